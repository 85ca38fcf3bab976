"""Processes that are killed, that have the id of another host's, or that hold files open: nothing stays behind."""

from __future__ import annotations

import errno
import random
import time

from tests.nfs.conftest import ROUNDS


def test_a_writer_is_killed_and_its_staging_swept(nfs, mount):
    numbers = list(range(60))
    dice = random.Random(0)
    kills = 2 * ROUNDS
    for _ in range(kills):
        writer = nfs.worker("a")
        writer.start("put", numbers=dice.sample(numbers, len(numbers)))
        time.sleep(dice.uniform(0.05, 0.6))
        writer.kill()
    left = nfs.leftovers()
    assert 1 <= len(left) <= kills
    # Whatever has a name is whole. Another host leaves the litter alone for a day; the same host clears it at once.
    nfs.tell(nfs.server, "read", numbers=numbers)
    nfs.check()
    assert nfs.tell(nfs.worker("b"), "sweep") == 0
    same = nfs.worker("a")
    nfs.tell(same, "fill", numbers=numbers)
    nfs.tell(same, "close")
    assert nfs.leftovers() == []
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check()


def test_what_a_dead_host_left_is_swept_after_a_day(nfs, mount):
    writer = nfs.worker("a")
    nfs.tell(writer, "hold")
    nfs.tell(writer, "hand_over", number=1)
    staged = _wait_for_staging(nfs)
    writer.kill()
    other = nfs.worker("b")
    nfs.tell(other, "put", numbers=[2])
    assert staged in nfs.leftovers()
    nfs.ask(nfs.server, "age", name=staged)
    assert nfs.tell(other, "sweep") == 1
    nfs.tell(other, "close")
    assert nfs.leftovers() == []
    nfs.check()


def test_case_17_the_same_pid_on_both_hosts(nfs, mount):
    a, b = _twins(nfs)
    assert a.pid == b.pid
    numbers = list(range(10 * ROUNDS))
    nfs.together([worker.start("fill", numbers=numbers) for worker in (a, b)])
    assert nfs.count("written") == len(numbers)
    nfs.tell(a, "close")
    nfs.tell(a, "hold")
    before = nfs.leftovers()
    nfs.tell(a, "hand_over", number=10_000)
    staged = _wait_for_staging(nfs, before)
    b.kill()  # a process of this id is dead on b, and alive on a
    assert nfs.tell(nfs.worker("b"), "sweep") <= 1
    assert staged in nfs.leftovers()
    nfs.tell(a, "release")
    nfs.tell(a, "close")
    assert nfs.leftovers() == []
    assert nfs.tell(nfs.server, "read", numbers=[*numbers, 10_000]) == len(numbers) + 1
    nfs.check()


def test_case_17_evicted_while_another_host_has_it_open(nfs, mount):
    numbers = list(range(4))
    reader, other = nfs.worker("a"), nfs.worker("b")
    nfs.tell(reader, "fill", numbers=numbers)
    assert nfs.tell(reader, "read", numbers=numbers) == len(numbers)
    for how in ("rename", "rm"):
        nfs.tell(other, "remove", numbers=numbers, seconds=0.0, how=how)
        nfs.tell(reader, "read", numbers=numbers, seconds=0.5)  # served from its open files, or a miss
        nfs.tell(reader, "fill", numbers=numbers)
        nfs.tell(nfs.server, "fill", numbers=numbers)
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check(warnings=2)


def test_case_16_exclusive_create_and_rename_are_enough(nfs, mount):
    numbers = list(range(6 * ROUNDS))
    a, b = nfs.worker("a"), nfs.worker("b")
    for worker in (a, b):
        nfs.tell(worker, "restrict", error=errno.ENOLCK)
        assert worker.do("can_lock", folder=nfs.folder(worker)) is False
    nfs.together([worker.start("fill", numbers=numbers) for worker in (a, b)])
    assert nfs.count("written") == len(numbers)
    nfs.ask(nfs.server, "damage", number=0, how="flip")
    nfs.together([worker.start("fill", numbers=numbers, generation=1) for worker in (a, b)])
    for worker in (a, b):
        nfs.tell(worker, "close")
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    assert nfs.leftovers() == []
    nfs.check(warnings=2)


def test_litter_of_files_that_are_open_is_cleared(nfs, mount):
    # A client renames what is removed while one of its own processes has it open to .nfs…, in a folder that can then
    # not be removed either.
    numbers = list(range(4))
    holder, healer = nfs.worker("a"), nfs.worker("a")
    nfs.tell(holder, "put", numbers=numbers)
    assert nfs.tell(holder, "read", numbers=numbers) == len(numbers)
    for number in numbers:
        nfs.ask(nfs.server, "damage", number=number, how="document")  # what the holder reads is as good as ever
    nfs.tell(healer, "fill", numbers=numbers, generation=1)
    assert nfs.count("healed") == len(numbers)
    assert any(".nfs" in left for left in nfs.leftovers())
    nfs.tell(healer, "close")
    nfs.tell(holder, "read", numbers=numbers)
    holder.kill()
    healer.kill()
    sweeper = nfs.worker("a")
    nfs.tell(sweeper, "sweep")
    left = {path.split("/")[1] for path in nfs.leftovers()}
    for name in left:
        nfs.ask(nfs.server, "age", name=f"staging/{name}")
    assert nfs.tell(nfs.worker("b"), "sweep") == len(left)
    assert nfs.leftovers() == []
    nfs.check(warnings=1)


def _twins(nfs):
    """Start a process on each host, both with the same id."""
    a, b = nfs.worker("a"), nfs.worker("b")
    while a.pid != b.pid:
        late = a if a.pid < b.pid else b
        late.kill()
        target = max(a.pid, b.pid)
        a, b = (nfs.worker("a", pid_from=target), b) if late is a else (a, nfs.worker("b", pid_from=target))
    return a, b


def _wait_for_staging(nfs, before=()) -> str:
    """Wait until a writer that holds back has its folder in staging; return the folder."""
    end = time.monotonic() + 20
    while not (new := set(nfs.leftovers()) - set(before)):
        assert time.monotonic() < end
    (folder,) = new
    return folder
