"""Counters: exact within a process, summed over its workers, and readable."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import pytest

from tests.support import in_fork, run_script
from zcache.stats import SKIP_REASONS, WHOLE_REASONS, CacheStats, Counters


def test_counts_start_at_nothing():
    assert Counters().read() == CacheStats()
    assert CacheStats().skipped == {}


def test_counts_add_up():
    counters = Counters()
    counters.add(hits=1, raw_bytes=2**53 - 1, wait_s=0.25)
    counters.add(hits=2, wait_s=0.5, no_space=3)
    counters.add(unstorable=1)
    stats = counters.read()
    assert stats == CacheStats(hits=3, raw_bytes=2**53 - 1, wait_s=0.75, skipped={"unstorable": 1, "no_space": 3})
    assert all(type(n) is int for n in (stats.hits, stats.raw_bytes, stats.skipped["no_space"]))
    with pytest.raises(KeyError):
        counters.add(nonsense=1)


def test_every_counter_has_a_place_of_its_own():
    own = [n for n in CacheStats.__slots__ if n not in ("skipped", "read_whole")]
    names = [*own, *SKIP_REASONS, *WHOLE_REASONS]
    counters = Counters()
    for i, name in enumerate(names):
        counters.add(**{name: i + 1})
    stats = counters.read()
    reasons = {**stats.skipped, **stats.read_whole}
    found = [reasons[n] if n in reasons else getattr(stats, n) for n in names]
    assert found == list(range(1, len(names) + 1))


def test_a_reading_does_not_change_afterwards():
    counters = Counters()
    counters.add(hits=1)
    before = counters.read()
    counters.add(hits=1)
    assert (before.hits, counters.read().hits) == (1, 2)


def test_threads_lose_no_count():
    counters = Counters()

    def count():
        for _ in range(2000):
            counters.add(hits=1, misses=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (counters.read().hits, counters.read().misses) == (8000, 8000)


def _count(counters, start):
    start.wait()
    for _ in range(500):
        counters.add(hits=1)


def test_forked_workers_count_with_their_parent():
    context = multiprocessing.get_context("fork")
    counters, start = Counters(), context.Barrier(5)
    workers = [context.Process(target=_count, args=(counters, start)) for _ in range(4)]
    for w in workers:
        w.start()
    _count(counters, start)
    for w in workers:
        w.join()
        assert w.exitcode == 0
    assert counters.read().hits == 2500


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_count_with_their_parent(tmp_path, method):
    code = f"""
    import multiprocessing
    from zcache.stats import Counters

    def count(counters):
        for _ in range(100):
            counters.add(hits=1, io_error=1)

    if __name__ == "__main__":
        context = multiprocessing.get_context({method!r})
        counters = Counters()
        counters.add(hits=1)
        workers = [context.Process(target=count, args=(counters,)) for _ in range(2)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        print(counters.read().hits, counters.read().skipped)
    """
    assert run_script(code, folder=tmp_path) == "201 {'io_error': 200}"


def test_case_14_a_child_forked_while_a_thread_counts_still_counts():
    counters = Counters()

    def child():
        counters.add(hits=1)

    with counters._lock:
        in_fork(child)
    assert counters.read().hits == 1


@pytest.mark.parametrize(
    "duplicate", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_copy_counts_by_itself(duplicate):
    counters = Counters()
    counters.add(hits=1)
    other = duplicate(counters)
    assert other.read() == CacheStats()
    other.add(hits=5)
    assert (counters.read().hits, other.read().hits) == (1, 5)


def test_a_reading_is_for_people():
    text = str(
        CacheStats(
            hits=7, inflight_hits=2, misses=9, stored=4, raw_bytes=2**22, stored_bytes=2**21, wait_s=1.234, damaged=1,
            read_errors=2, skipped={"no_space": 3},
        )
    )  # fmt: skip
    assert text.splitlines() == [
        "7 hits, 2 served while being written, 9 misses",
        "4 stored: 4.0 MiB in memory, 2.0 MiB on disk (2.0 x smaller)",
        "1.23 s waited for the writers",
        "1 damaged entries, 2 read errors: recomputed",
        "3 times not stored: the disk or the quota is full",
    ]
    assert str(CacheStats()).splitlines() == [
        "0 hits, 0 served while being written, 0 misses",
    ]


def _asks(counters, queue):
    queue.put(counters.is_first("no_space"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_of_all_processes_one_is_the_first(method):
    counters = Counters()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    found = [counters.is_first("damaged")]
    for _ in range(2):
        child = context.Process(target=_asks, args=(counters, queue))
        child.start()
        found.append(queue.get(timeout=60))
        child.join()
    assert found == [True, True, False]
    assert counters.read() == CacheStats()
