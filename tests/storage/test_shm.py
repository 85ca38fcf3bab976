"""The directory of shared files: who may use it, when it goes, what fits, and what killed processes leave."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zcache.errors import CacheConfigError, EntryDamagedError
from zcache.storage import ledger, membership, shm
from zcache.storage.shm import NoMemoryError, SharedDirectory

PAGE = 4096


def name(i):
    return f"{i:032x}"


def joined(base, budget=100 * PAGE, **kwargs):
    return SharedDirectory(base, lambda _: budget, **kwargs)


def put(directory, i, n_pages=1, data=None):
    new, n_evicted = directory.create(name(i), n_pages * PAGE)
    if new is None:
        return None
    with new:
        new.write(0, data or bytes([i]) * (n_pages * PAGE))
        new.publish()
    return n_evicted


def held(directory):
    return sorted(int(one, 16) for one in directory.names())


def read(directory, i):
    found = directory.open(name(i))
    return None if found is None else bytes(found[0])


def used_at(directory, i, seconds):
    os.utime(directory.path / name(i), (seconds, seconds))


# --- taking part ---------------------------------------------------------------------------------------------------


def test_the_directory_and_its_files_are_private(tmp_path):
    os.umask(os.umask(0))
    directory = joined(tmp_path)
    put(directory, 1)
    assert directory.path.parent == tmp_path
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in directory.path.iterdir()} == {0o600}
    directory.leave()


def test_the_last_to_leave_removes_it(tmp_path):
    a, b = joined(tmp_path), joined(tmp_path)
    assert put(a, 1) == 0
    a.leave()
    assert read(b, 1) == bytes([1]) * PAGE
    b.leave()
    b.leave()
    assert list(tmp_path.iterdir()) == []


def test_whoever_keeps_leaves_it_for_the_next_run(tmp_path):
    first = joined(tmp_path, keep=True)
    put(first, 1, 3)
    first.leave()
    second = joined(tmp_path)
    assert read(second, 1) == bytes([1]) * 3 * PAGE
    assert second.used_bytes() == 3 * PAGE
    second.leave()
    assert list(tmp_path.iterdir()) == []


def test_joining_while_the_last_one_leaves_never_ends_outside(tmp_path):
    stop = time.monotonic() + 3
    failures = []

    def come_and_go(i):
        try:
            while time.monotonic() < stop:
                directory = joined(tmp_path)
                put(directory, i)
                assert directory.path.stat().st_ino == os.fstat(directory.fd).st_ino
                assert read(directory, i) in (bytes([i]) * PAGE, None)
                directory.leave()
        except BaseException as e:  # noqa: BLE001
            failures.append(e)

    threads = [threading.Thread(target=come_and_go, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from tests.storage.test_shm import joined, name, put
directory = joined(sys.argv[1])
put(directory, 1, 2)
new, _ = directory.create(name(2), 5 * 4096)
new.write(0, b"half")
print("ready", flush=True)
signal.pause()
"""


def killed(base):
    job = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(base)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    return job


def end(job):
    job.kill()
    job.wait()
    job.stdout.close()


def test_case_21_what_a_killed_process_left_is_reclaimed_by_the_next(tmp_path):
    job = killed(tmp_path)
    end(job)
    directory = joined(tmp_path)
    assert not [p for p in directory.path.iterdir() if p.suffix == ".part"]
    assert directory.used_bytes() == 2 * PAGE
    assert read(directory, 1) == bytes([1]) * 2 * PAGE
    directory.leave()
    assert list(tmp_path.iterdir()) == []


def test_case_21_survivors_get_the_memory_back_that_a_killed_process_had_begun_to_fill(tmp_path):
    directory = joined(tmp_path, 6 * PAGE)
    job = killed(tmp_path)
    assert directory.used_bytes() == 7 * PAGE  # with the other's larger budget
    end(job)
    assert put(directory, 3, 4) == 0  # fits only without the half-written one
    assert held(directory) == [1, 3]
    assert directory.used_bytes() == 6 * PAGE
    directory.leave()


def test_a_forked_child_that_ends_does_not_take_the_directory_with_it(tmp_path):
    directory = joined(tmp_path)
    put(directory, 1)
    pid = os.fork()
    if pid == 0:
        directory.abandon()
        mine = joined(tmp_path)
        mine.leave()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert read(directory, 1) == bytes([1]) * PAGE
    directory.leave()
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_starts_of_the_machine_left_goes(tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(membership, "_boot", lambda: "earlier")
        joined(tmp_path, keep=True).leave()
    (tmp_path / f"zcache-{os.geteuid()}-x.gone-1").mkdir(mode=0o700)
    (tmp_path / "zcache-99999-earlier").mkdir(mode=0o700)
    directory = joined(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["zcache-99999-earlier", directory.path.name])
    directory.leave()


# --- what may be trusted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused(tmp_path, mode):
    directory = joined(tmp_path)
    path = directory.path
    directory.leave()
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(CacheConfigError, match="memory_dir="):
        joined(tmp_path)
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_somebody_else_is_refused(tmp_path):
    directory = joined(tmp_path)
    path = directory.path
    directory.leave()
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(CacheConfigError, match="somebody else"):
        joined(tmp_path)


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path):
    directory = joined(tmp_path)
    path = directory.path
    directory.leave()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheConfigError):
        joined(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    path.unlink()
    path.write_bytes(b"")
    with pytest.raises(CacheConfigError):
        joined(tmp_path)


def test_a_file_that_is_a_link_a_pipe_or_open_to_others_is_not_mapped(tmp_path):
    directory = joined(tmp_path)
    (directory.path / name(1)).symlink_to(__file__)
    with pytest.raises(OSError):
        directory.open(name(1))
    os.mkfifo(directory.path / name(2), 0o600)
    with pytest.raises(EntryDamagedError):
        directory.open(name(2))
    (directory.path / name(3)).write_bytes(b"x" * PAGE)
    (directory.path / name(3)).chmod(0o644)
    with pytest.raises(EntryDamagedError):
        directory.open(name(3))
    (directory.path / name(4)).touch(0o600)
    with pytest.raises(EntryDamagedError):
        directory.open(name(4))
    directory.leave()


@pytest.mark.parametrize("bad", ["../x", "in-use", "ledger", "", "0" * 31, "g" * 32, "0" * 32 + ".want"])
def test_only_keys_are_names(tmp_path, bad):
    directory = joined(tmp_path)
    with pytest.raises(ValueError, match="name of a file"):
        directory.open(bad)
    directory.leave()


# --- what fits -----------------------------------------------------------------------------------------------------


def test_a_file_that_exists_is_not_written_again(tmp_path):
    directory = joined(tmp_path)
    assert put(directory, 1) == 0
    assert put(directory, 1) is None
    assert directory.used_bytes() == PAGE
    directory.leave()


def test_the_first_of_two_that_are_written_at_once_stays(tmp_path):
    directory = joined(tmp_path)
    a, _ = directory.create(name(1), PAGE)
    b, _ = directory.create(name(1), PAGE)
    with a, b:
        a.write(0, b"a" * PAGE)
        b.write(0, b"b" * PAGE)
        a.publish()
        b.publish()
    assert read(directory, 1) == b"a" * PAGE
    assert directory.used_bytes() == PAGE
    assert not [p for p in directory.path.iterdir() if p.suffix == ".part"]
    directory.leave()


def test_what_was_not_published_is_gone_and_does_not_count(tmp_path):
    directory = joined(tmp_path)
    new, _ = directory.create(name(1), 3 * PAGE)
    assert directory.used_bytes() == 3 * PAGE
    with new:
        new.write(0, b"x")
    assert directory.used_bytes() == 0
    assert held(directory) == []
    directory.leave()


def test_larger_than_the_budget_is_refused_at_once(tmp_path):
    directory = joined(tmp_path, 2 * PAGE)
    put(directory, 1, 2)
    assert put(directory, 2, 3) is None
    assert held(directory) == [1]
    directory.leave()


def test_what_another_run_used_makes_room_the_least_recently_used_first(tmp_path):
    directory = joined(tmp_path, 4 * PAGE, keep=True)
    for i in range(4):
        put(directory, i)
        used_at(directory, i, 1000 + (i * 7) % 4)  # 0, 3, 2, 1: least recently first
    directory.leave()
    directory = joined(tmp_path, 4 * PAGE)
    assert put(directory, 8, 2) == 2
    assert held(directory) == [1, 2, 8]
    assert directory.used_bytes() == 4 * PAGE
    assert directory.n_evicted() == 2
    directory.leave()


def test_epochs_over_more_than_fits_keep_what_is_there(tmp_path):
    """Giving up what was used least recently would keep nothing until its turn: here 3 of 5 are found in each epoch."""
    directory = joined(tmp_path, 3 * PAGE)
    hits = []
    for epoch in range(6):
        hits.append(0)
        for i in [(7 * k + epoch) % 5 for k in range(5)]:  # another order each time
            if read(directory, i) is None:
                put(directory, i)
            else:
                directory.touch(name(i))
                hits[-1] += 1
    assert hits == [0, 3, 3, 3, 3, 3]
    directory.leave()


def test_what_is_not_read_any_more_makes_room_within_three_epochs(tmp_path):
    directory = joined(tmp_path, 3 * PAGE)
    for i in (1, 2, 3):
        put(directory, i)
    for epoch in range(4):
        for i in (3, 4, 5):
            if read(directory, i) is None:
                put(directory, i)
            else:
                directory.touch(name(i))
        assert held(directory) == ([1, 2, 3] if epoch < 2 else [3, 4, 5])
    directory.leave()


def test_a_reader_keeps_what_is_given_up_under_it(tmp_path):
    directory = joined(tmp_path, PAGE, keep=True)
    put(directory, 1)
    mapping, identity = directory.open(name(1))
    directory.leave()
    time.sleep(0.02)
    directory = joined(tmp_path, PAGE)
    assert put(directory, 2) == 1
    assert directory.identify(name(1)) is None
    assert bytes(mapping) == bytes([1]) * PAGE
    assert identity.nbytes == PAGE
    directory.leave()


def test_a_copy_on_write_mapping_is_its_owners_alone(tmp_path):
    directory = joined(tmp_path)
    put(directory, 1)
    mapping, _ = directory.open(name(1), copy_on_write=True)
    mapping[:4] = b"mine"
    assert read(directory, 1) == bytes([1]) * PAGE
    plain, _ = directory.open(name(1))
    with pytest.raises(TypeError):
        plain[:4] = b"ours"
    directory.leave()


def test_a_full_file_system_is_an_error_and_no_signal(tmp_path, monkeypatch):
    directory = joined(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    new, _ = directory.create(name(1), PAGE)
    with new:
        monkeypatch.setattr(shm.os, "pwrite", full)
        with pytest.raises(NoMemoryError):
            new.write(0, b"x")
        monkeypatch.undo()
    assert directory.used_bytes() == 0
    directory.leave()


def test_a_stopped_process_that_holds_the_ledger_holds_nobody_up_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "PATIENCE_S", 0.05)
    directory = joined(tmp_path)
    put(directory, 1)
    with (directory.path / "ledger").open("rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="locked"):
            directory.create(name(2), PAGE)
        assert read(directory, 1) == bytes([1]) * PAGE  # readers take no lock
    assert put(directory, 2) == 0
    directory.leave()


def sizes(path):
    for one in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield one.stat().st_size if one.name not in ("ledger", "in-use") else 0


def fill_many(base, first, budget, started):
    directory = joined(base, budget)
    started.wait()
    for i in range(first, first + 40):
        put(directory, i % 100, 1 + i % 3)
        assert directory.used_bytes() <= budget
    directory.leave()


def test_the_budget_holds_for_all_processes_together(tmp_path):
    context = multiprocessing.get_context("fork")
    budget = 50 * PAGE
    started = context.Barrier(4)
    base = joined(tmp_path, budget)
    jobs = [context.Process(target=fill_many, args=(tmp_path, 25 * k, budget, started)) for k in range(4)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        assert sum(sizes(base.path)) <= budget + 12 * PAGE  # a file that gets its name between two looks counts twice
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert base.used_bytes() == sum((base.path / n).stat().st_size for n in base.names()) <= budget
    base.leave()
