"""Threads of one read: every part once, errors heard, bounded by the CPUs, none in workers, fresh after a fork."""

from __future__ import annotations

import os
import threading

import pytest

from tests.support import in_fork, run_script
from zcache.storage import threads
from zcache.storage.threads import ReadThreads


@pytest.fixture
def three_cpus(monkeypatch):
    monkeypatch.setattr(threads, "cpu_count", lambda: 3)


@pytest.mark.parametrize("n_parts", [0, 1, 2, 3, 4, 10])
def test_every_part_runs_once_and_neighbours_together(three_cpus, n_parts):
    seen = []
    ReadThreads(3).run(lambda some: seen.append(list(some)), list(range(n_parts)))
    assert sorted(part for some in seen for part in some) == list(range(n_parts))
    assert all(some == list(range(some[0], some[-1] + 1)) for some in seen if some)
    assert len(seen) == max(1, min(3, n_parts))


def test_parts_run_side_by_side(three_cpus):
    meet = threading.Barrier(3, timeout=30)
    ReadThreads(3).run(lambda _: meet.wait(), [1, 2, 3])


def test_the_first_error_is_raised_after_all_are_done(three_cpus):
    done = []

    def work(some):
        if some[0] == 1:
            raise OSError("disk")
        done.append(some[0])

    with pytest.raises(OSError, match="disk"):
        ReadThreads(3).run(work, [0, 1, 2])
    assert sorted(done) == [0, 2]


def test_case_19_never_more_threads_than_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7}, raising=False)
    assert ReadThreads(64).count == 2
    assert ReadThreads(1).count == 1


def test_case_19_one_thread_in_a_worker_process(three_cpus, tmp_path):
    assert ReadThreads(3).count == 3
    code = """
    import multiprocessing, os, threading
    import zcache.storage.threads as threads
    from zcache.storage.threads import ReadThreads

    def worker(passed):
        own = ReadThreads(3)
        own.run(lambda some: None, range(9))
        passed.run(lambda some: None, range(9))
        assert (own.count, passed.count) == (1, 1), (own.count, passed.count)
        assert threading.active_count() == 1

    if __name__ == "__main__":
        threads.cpu_count = lambda: 3
        shared = ReadThreads(3)
        shared.run(lambda some: None, range(9))
        assert shared.count == 3
        process = multiprocessing.get_context("fork").Process(target=worker, args=(shared,))
        process.start()
        process.join()
        assert process.exitcode == 0
        print("done")
    """
    assert run_script(code, folder=tmp_path) == "done"


def test_a_fork_gets_threads_of_its_own(three_cpus):
    shared = ReadThreads(3)
    shared.run(lambda some: None, range(9))

    def child():
        seen = []
        shared.run(seen.extend, range(9))
        assert sorted(seen) == list(range(9))

    in_fork(child)
