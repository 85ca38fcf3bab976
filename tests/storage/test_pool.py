"""The writer pool: every job once, memory bounded, no thread that outlives its use, no lock that outlives a fork."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.support import in_fork, key, run_script, staging_left
from zcache.cache import Cache
from zcache.storage import pool as zp
from zcache.storage.pool import WriterPool

WAIT_S = 30


class Recorder:
    """A pool whose jobs are functions; what ran, what failed, and when it came to rest."""

    def __init__(self, writers=2, max_pending_bytes=100):
        self.ran, self.failures, self.rests = [], [], []
        self.threads = set()
        self.pool = WriterPool(
            self._work,
            lambda name, _job, e: self.failures.append((name, e)),
            writers=writers,
            max_pending_bytes=max_pending_bytes,
            at_rest=self.rests.append,
        )

    def _work(self, name, job):
        self.threads.add(threading.current_thread())
        job()
        self.ran.append(name)


class Block:
    """A job that runs until it is released."""

    def __init__(self):
        self.running, self.release = threading.Event(), threading.Event()

    def __call__(self):
        self.running.set()
        assert self.release.wait(WAIT_S)


def nothing():
    pass


def eventually(true):
    end = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < end:
        time.sleep(0.002)
    assert true()


def blocked_submit(pool, *args):
    """Submit on a thread of its own; return the thread and the list that receives the seconds waited."""
    waited = []
    thread = threading.Thread(target=lambda: waited.append(pool.submit(*args)))
    thread.start()
    return thread, waited


@pytest.fixture(autouse=True)
def short_idle(monkeypatch):
    monkeypatch.setattr(zp, "_IDLE_S", 0.05)


def test_every_job_runs_once():
    r = Recorder(writers=3, max_pending_bytes=50)
    for i in range(200):
        r.pool.submit(key(i), nothing, 10)
    r.pool.drain()
    assert sorted(r.ran) == [key(i) for i in range(200)]
    assert not r.failures


def test_no_more_threads_than_asked_for():
    r = Recorder(writers=2)
    blocks = [Block() for _ in range(5)]
    for i, block in enumerate(blocks):
        r.pool.submit(key(i), block, 1)
    assert blocks[0].running.wait(WAIT_S)
    assert blocks[1].running.wait(WAIT_S)
    assert len(r.threads) == r.pool._state.threads == 2
    assert not blocks[2].running.is_set()
    for block in blocks:
        block.release.set()
    r.pool.drain()
    assert len(r.ran) == 5
    assert len(r.threads) == 2


def test_no_more_threads_than_there_is_work_for(monkeypatch):
    monkeypatch.setattr(zp, "_IDLE_S", WAIT_S)
    r = Recorder(writers=8)
    for i in range(5):
        r.pool.submit(key(i), nothing, 1)
        r.pool.drain()
        eventually(lambda: r.pool._state.idle == r.pool._state.threads)
    assert len(r.threads) == 1


def test_a_job_is_pending_until_it_is_done():
    r, block = Recorder(), Block()
    r.pool.submit(key(1), block, 1)
    assert r.pool.pending(key(1)) is block
    assert block.running.wait(WAIT_S)
    assert r.pool.pending(key(1)) is block
    assert r.pool.pending(key(2)) is None
    block.release.set()
    r.pool.drain()
    assert r.pool.pending(key(1)) is None


def test_the_first_job_of_a_key_is_kept():
    r, block, queued = Recorder(writers=1), Block(), Block()
    queued.release.set()
    r.pool.submit(key(1), block, 60)
    r.pool.submit(key(2), queued, 20)
    second = Block()
    for name in (key(1), key(2)):
        r.pool.submit(name, second, 10**6)  # neither waits nor counts: the key is there
    assert r.pool.pending(key(1)) is block
    assert r.pool.pending(key(2)) is queued
    block.release.set()
    r.pool.drain()
    assert r.ran == [key(1), key(2)]
    assert not second.running.is_set()
    second.release.set()
    r.pool.submit(key(1), second, 1)  # done: a new job may come
    r.pool.drain()
    assert second.running.is_set()


def test_a_full_pool_makes_the_caller_wait_and_says_how_long():
    r, block = Recorder(writers=1, max_pending_bytes=100), Block()
    assert r.pool.submit(key(1), block, 60) < WAIT_S
    r.pool.submit(key(2), nothing, 40)  # exactly full
    thread, waited = blocked_submit(r.pool, key(3), nothing, 1)
    thread.join(0.05)
    assert thread.is_alive()
    assert r.pool.pending(key(3)) is None
    block.release.set()
    thread.join(WAIT_S)
    assert 0.04 < waited[0] < WAIT_S
    r.pool.drain()
    assert r.ran == [key(1), key(2), key(3)]


def test_one_job_is_always_admitted_however_large():
    r, block = Recorder(max_pending_bytes=100), Block()
    r.pool.submit(key(1), block, 10**12)
    assert block.running.wait(WAIT_S)
    thread, _ = blocked_submit(r.pool, key(2), nothing, 1)
    thread.join(0.05)
    assert thread.is_alive()
    block.release.set()
    thread.join(WAIT_S)
    r.pool.drain()
    assert r.ran == [key(1), key(2)]


def test_a_job_that_fails_is_told_and_does_not_stop_the_others():
    r = Recorder(writers=1)

    def fail():
        raise OSError(28, "full")

    r.pool.submit(key(1), fail, 60)
    r.pool.submit(key(2), nothing, 60)  # waits for the memory of the one that failed
    r.pool.submit(key(3), lambda: {}[0], 1)
    r.pool.submit(key(4), nothing, 1)
    r.pool.drain()
    assert r.ran == [key(2), key(4)]
    assert [(name, type(e)) for name, e in r.failures] == [(key(1), OSError), (key(3), KeyError)]
    assert r.pool.pending(key(1)) is None


def test_several_threads_submit_and_drain():
    r = Recorder(writers=2, max_pending_bytes=20)

    def use(start):
        for i in range(start, start + 50):
            r.pool.submit(key(i), nothing, 7)
        r.pool.drain()
        assert {key(i) for i in range(start, start + 50)} <= set(r.ran)

    failures = []

    def guarded(start):
        try:
            use(start)
        except AssertionError as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(n * 50,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_S)
        assert not t.is_alive()
    assert not failures
    assert len(r.ran) == 200


def test_draining_waits_for_what_was_submitted_before_alone():
    r, first, later = Recorder(writers=2), Block(), Block()
    r.pool.submit(key(1), first, 1)
    drained = threading.Thread(target=r.pool.drain)
    drained.start()
    assert first.running.wait(WAIT_S)
    drained.join(0.02)
    assert drained.is_alive()
    r.pool.submit(key(2), later, 1)
    first.release.set()
    drained.join(WAIT_S)
    assert not drained.is_alive()
    assert later.running.is_set()
    later.release.set()
    r.pool.drain()


def test_draining_nothing_returns():
    Recorder().pool.drain()


def test_case_19_idle_threads_end_and_come_back():
    r = Recorder(writers=2)
    for i in range(20):
        r.pool.submit(key(i), nothing, 1)
    r.pool.drain()
    eventually(lambda: r.rests == [False])
    eventually(lambda: not any(t.is_alive() for t in r.threads))
    assert r.threads
    r.pool.submit(key(99), nothing, 1)
    r.pool.drain()
    assert len(r.ran) == 21
    eventually(lambda: r.rests == [False, False])


def test_a_pool_that_is_dropped_is_collected_once_its_work_is_done():
    r, block = Recorder(), Block()
    r.pool.submit(key(1), block, 1)
    gone = weakref.ref(r.pool)
    ran = r.ran
    del r
    block.release.set()
    eventually(lambda: ran == [key(1)])
    del block

    def collected():
        gc.collect()
        return gone() is None

    eventually(collected)


def test_case_14_a_forked_child_of_a_busy_parent_has_an_empty_pool_that_works():
    r, block = Recorder(writers=1), Block()
    r.pool.submit(key(1), block, 60)
    assert block.running.wait(WAIT_S)
    r.pool.submit(key(2), nothing, 40)

    def child():
        assert r.pool.pending(key(1)) is None
        r.pool.drain()  # nothing of the child's own is pending
        r.pool.submit(key(1), nothing, 100)
        r.pool.submit(key(3), nothing, 100)
        r.pool.drain()
        assert r.ran == [key(1), key(3)]

    in_fork(child)
    assert r.ran == []
    assert r.pool.pending(key(2)) is nothing
    block.release.set()
    r.pool.drain()
    assert r.ran == [key(1), key(2)]


def test_case_14_a_child_forked_while_a_thread_holds_the_pools_lock_works():
    r = Recorder()
    r.pool.submit(key(1), nothing, 1)
    r.pool.drain()

    def child():
        r.pool.submit(key(2), nothing, 1)
        r.pool.drain()
        assert key(2) in r.ran

    with r.pool._state.changed:
        in_fork(child)


def test_where_no_thread_can_start_the_caller_does_the_work(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    r = Recorder()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    r.pool.submit(key(1), nothing, 10**9)
    assert r.ran == [key(1)]
    r.pool.drain()


def test_in_a_worker_process_the_backlog_is_short_enough_to_finish_at_exit(monkeypatch):
    monkeypatch.setattr(zp, "_in_worker_process", lambda: True)
    r, block = Recorder(writers=1, max_pending_bytes=10**12), Block()
    guess = int(zp._FIRST_GUESS_BYTES_PER_S * zp.WORKER_BACKLOG_S)
    r.pool.submit(key(1), block, guess)
    thread, waited = blocked_submit(r.pool, key(2), nothing, 1)
    thread.join(0.05)
    assert thread.is_alive()
    block.release.set()
    thread.join(WAIT_S)
    assert waited
    # One that is too large to leave behind is waited for.
    large = Block()
    thread, _ = blocked_submit(r.pool, key(3), large, guess * 10**6)
    assert large.running.wait(WAIT_S)
    thread.join(0.05)
    assert thread.is_alive()
    large.release.set()
    thread.join(WAIT_S)
    assert r.ran == [key(1), key(2), key(3)]


SLOW = """
    import multiprocessing, os, sys, time
    import numpy as np
    import zcache.storage.recorder
    from zcache.cache import Cache

    real = zcache.storage.recorder.write_entry

    def slow(*args, **kwargs):
        time.sleep(0.2)
        return real(*args, **kwargs)

    zcache.storage.recorder.write_entry = slow

    def fill(cache, first):
        for i in range(first, first + 6):
            cache.put(f"{i:032x}", {"image": np.arange(9999) * i % 1000})
        assert cache.stats.stored < 6 + first
"""


def assert_filled(cache_dir: Path, n: int) -> None:
    cache = Cache(cache_dir, read_only=True)
    assert sorted(cache.keys()) == [key(i) for i in range(n)]
    for i in range(n):
        assert cache.get(key(i))["image"].sum() == sum(j * i % 1000 for j in range(9999))
    assert staging_left(cache_dir) == []


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "del cache"])
def test_the_end_of_the_interpreter_drains(tmp_path, end):
    code = f"{SLOW}\n    cache = Cache(sys.argv[1])\n    fill(cache, 0)\n    {end}\n"
    run_script(code, tmp_path / "c", folder=tmp_path)
    assert_filled(tmp_path / "c", 6)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_case_14_the_end_of_a_worker_process_drains_while_its_parent_writes_too(tmp_path, method):
    code = f"""{SLOW}
    if __name__ == "__main__":
        context = multiprocessing.get_context({method!r})
        cache = Cache(sys.argv[1])
        fill(cache, 0)
        workers = [context.Process(target=fill, args=(cache, first)) for first in (6, 12)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        assert [w.exitcode for w in workers] == [0, 0]
        assert len(list(cache.keys())) >= 12, list(cache.keys())
        cache.close()
        print(cache.stats.stored, cache.stats.already_stored)
    """
    assert run_script(code, tmp_path / "c", folder=tmp_path) == "18 0"
    assert_filled(tmp_path / "c", 18)


def test_a_child_of_os_fork_that_ends_like_a_script_drains_its_own(tmp_path):
    code = f"""{SLOW}
    cache = Cache(sys.argv[1])
    fill(cache, 0)
    if os.fork() == 0:
        fill(cache, 6)
        sys.exit(0)
    assert os.wait()[1] == 0
    assert len([k for k in cache.keys() if int(k, 16) >= 6]) == 6
    """
    run_script(code, tmp_path / "c", folder=tmp_path)
    assert_filled(tmp_path / "c", 12)
