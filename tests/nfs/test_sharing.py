"""Two hosts that fill and read one cache at the same time."""

from __future__ import annotations

import random

import pytest

from tests.nfs.conftest import LONG, ROUNDS

_CACHED_S = 45.0  # a client believes for up to half a minute that a name it looked for in vain is not there
_MEET_EVERY_S = 0.15
_WARNINGS_EACH = 2  # a process warns once of damage and once of what it could not read


def test_both_hosts_fill_the_same_keys_at_once(nfs, mount):
    numbers = list(range(15 * ROUNDS))
    workers = [nfs.worker(host) for host in "abab"]
    calls = []
    for i, worker in enumerate(workers):
        own = numbers.copy()
        random.Random(i // 2).shuffle(own)  # each order on both hosts
        calls.append(worker.start("fill", numbers=own))
    nfs.together(calls, allowed_s=5.0 * ROUNDS)
    assert nfs.count("written") == len(numbers)
    assert nfs.count("misses") == nfs.count("written") + nfs.count("raced")
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    if LONG:
        for worker in workers[:2]:
            seen = nfs.tell(worker, "poll", numbers=numbers, seconds=_CACHED_S, allowed_s=_CACHED_S)
            assert len(seen) == len(numbers)
    for worker in workers:
        nfs.tell(worker, "close")
    assert nfs.leftovers() == []
    nfs.check()


def test_of_two_hosts_that_publish_at_once_one_wins(nfs, mount):
    numbers = list(range(8 * ROUNDS))
    a, b = nfs.worker("a"), nfs.worker("b")
    start = nfs.server.do("now") + 0.3
    appointments = {"numbers": numbers, "start": start, "every": _MEET_EVERY_S}
    calls = [a.start("meet", generation=1, **appointments), b.start("meet", generation=2, **appointments)]
    nfs.together(calls, allowed_s=2 * ROUNDS)
    assert (nfs.count("written"), nfs.count("raced")) == (len(numbers), len(numbers))
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check()


def test_a_reader_polls_during_publication(nfs, mount):
    numbers = list(range(8 * ROUNDS))
    writer, reader = nfs.worker("a"), nfs.worker("b")
    fresh = "actimeo=0" in mount
    seconds = 20.0 if fresh else _CACHED_S
    reading = reader.start("poll", numbers=numbers, seconds=seconds if LONG or fresh else 3.0)
    done = nfs.tell(writer, "put", numbers=numbers, pause=0.05, allowed_s=ROUNDS)
    (seen,) = nfs.together([reading], allowed_s=seconds)
    nfs.check()
    if LONG:
        assert len(seen) == len(numbers)
        late = max(seen[number] - done[number] for number in done)
        assert late < (5.0 if fresh else _CACHED_S)


@pytest.mark.parametrize("how", ["rename", "rm"])
def test_one_host_removes_while_the_other_reads_and_fills(nfs, mount, how):
    numbers = list(range(6))
    seconds = 1.0 * ROUNDS
    reader, filler, remover = nfs.worker("a"), nfs.worker("a"), nfs.worker("b")
    nfs.tell(filler, "fill", numbers=numbers)
    calls = [remover.start("remove", numbers=numbers, seconds=seconds, how=how)]
    calls.append(reader.start("read", numbers=numbers, seconds=seconds))
    calls.append(filler.start("read_and_fill", numbers=numbers, seconds=seconds))
    nfs.together(calls, allowed_s=seconds)
    assert nfs.count("removed") > 0
    nfs.check(warnings=_WARNINGS_EACH * 2)
    # What was half removed is mended, and stays.
    nfs.tell(nfs.server, "fill", numbers=numbers)
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check(warnings=_WARNINGS_EACH * 3)


def test_damaged_entries_are_replaced_while_others_have_them_open(nfs, mount):
    # A file that vanished is still there for a client that knows it, and gives ESTALE: that is a miss until the client
    # knows better, and damage then.
    hows = ["flip", "cut", "document", *(["lost"] if LONG else [])]
    numbers = list(range(len(hows)))
    a, b = nfs.worker("a"), nfs.worker("b")
    nfs.tell(a, "put", numbers=numbers)
    assert nfs.tell(b, "read", numbers=numbers) == len(numbers)
    for number, how in enumerate(hows):
        nfs.ask(nfs.server, "damage", number=number, how=how)
    others = [nfs.worker("a"), nfs.worker("b")]
    seconds = _CACHED_S if LONG else 0.0
    nfs.together([o.start("fill_until_read", numbers=numbers, seconds=seconds, generation=1) for o in others])
    assert nfs.count("healed") >= 3
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.together([worker.start("fill", numbers=numbers, generation=2) for worker in (a, b)])
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check(warnings=_WARNINGS_EACH * 5)


def test_an_entry_that_this_host_cannot_see_yet_is_not_replaced(nfs):
    a, b = nfs.worker("a"), nfs.worker("b")
    nfs.tell(b, "put", numbers=[0])
    assert nfs.tell(b, "read", numbers=[1]) == 0  # from now on b believes that there is none
    nfs.tell(a, "put", numbers=[1])
    nfs.tell(b, "put_while_others_publish", number=1, other=2, generation=1)
    assert (nfs.count("written"), nfs.count("raced")) == (2, 1)
