"""A bounded pool of background threads that survives forks, drains at exit and never blocks a DataLoader's end."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from typing import Any, Generic, TypeVar

__all__ = ["WORKER_BACKLOG_S", "WriterPool"]

T = TypeVar("T")

WORKER_BACKLOG_S = 2.0
"""A DataLoader terminates a worker that takes more than 5 s to exit: the backlog in a worker stays below this."""

_FIRST_GUESS_BYTES_PER_S = 100e6
_IDLE_S = 5.0  # an idle thread ends after this long: a data set that is dropped leaves nothing behind


class _State(Generic[T]):
    """What belongs to one process: jobs, threads and their lock."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()
        self.queue: deque[str] = deque()
        self.jobs: dict[str, tuple[T, int]] = {}
        self.pending_bytes = 0
        self.threads = 0
        self.idle = 0
        self.bytes_per_s = 0.0  # of one thread, a moving average; 0 until the first job is done


class WriterPool(Generic[T]):
    """Runs jobs, each under a key, on background threads.

    Threads start with the first job of a process and end when there is nothing to do. A forked or spawned child
    begins with an empty pool of its own: the parent's jobs stay the parent's. When the interpreter or a worker
    process exits, what is pending is finished first.

    Parameters
    ----------
    work : callable
        ``work(key, job)`` runs on a pool thread.
    failed : callable
        ``failed(key, job, error)`` is told, on the pool thread, what `work` raised. Must not raise.
    writers : int
        Threads at most.
    max_pending_bytes : int
        Jobs wait in memory up to this many bytes; one job is always admitted.
    at_rest : callable
        ``at_rest(exiting)`` is called when the last thread of a process has ended, and when the process exits.
    """

    def __init__(
        self,
        work: Callable[[str, T], None],
        failed: Callable[[str, T, Exception], None],
        *,
        writers: int,
        max_pending_bytes: int,
        at_rest: Callable[[bool], None],
    ) -> None:
        self._work = work
        self._failed = failed
        self._writers = writers
        self._max_pending_bytes = max_pending_bytes
        self._at_rest = at_rest
        self._state: _State[T] = _State()

    def pending(self, key: str) -> T | None:
        """Return the job of a key that is not finished, or None."""
        state = self._mine()
        with state.changed:
            found = state.jobs.get(key)
        return None if found is None else found[0]

    def submit(self, key: str, job: T, nbytes: int) -> float:
        """Queue a job; wait while the jobs before it fill the memory allowed.

        A key that is pending already keeps its first job.

        Parameters
        ----------
        key : str
            Name of the job.
        job : T
            Passed to `work`.
        nbytes : int
            Memory that the job holds until it is done.

        Returns
        -------
        float
            Seconds waited.
        """
        state = self._mine()
        begun = time.perf_counter()
        with state.changed:
            limit = self._limit_bytes(state)
            while state.jobs and state.pending_bytes + nbytes > limit and key not in state.jobs:
                state.changed.wait()
                limit = self._limit_bytes(state)
            if key in state.jobs:
                return time.perf_counter() - begun
            state.jobs[key] = (job, nbytes)
            state.queue.append(key)
            state.pending_bytes += nbytes
            started = self._start_thread(state)
            state.changed.notify_all()
            while (nbytes > limit and _in_worker_process()) and key in state.jobs and started:
                state.changed.wait()  # too large to leave behind: a worker that exits late is terminated
        if not started:  # the interpreter is shutting down and starts no threads
            self._run(state, until_empty=True)
        return time.perf_counter() - begun

    def drain(self) -> None:
        """Wait until every job submitted so far in this process is done."""
        state = self._mine()
        with state.changed:
            waiting_for = {key: job for key, (job, _) in state.jobs.items()}
            while any(key in state.jobs and state.jobs[key][0] is job for key, job in waiting_for.items()):
                state.changed.wait()

    def finish(self) -> None:
        """Drain before the process exits."""
        self.drain()
        self._at_rest(True)

    def _mine(self) -> _State[T]:
        """Return this process's state: fresh in a forked child, where the parent's threads do not exist."""
        if self._state.pid != os.getpid():
            self._state = _State()
        return self._state

    def _limit_bytes(self, state: _State[T]) -> float:
        if not _in_worker_process():
            return self._max_pending_bytes
        rate = state.bytes_per_s * self._writers or _FIRST_GUESS_BYTES_PER_S
        return min(self._max_pending_bytes, rate * WORKER_BACKLOG_S)

    def _start_thread(self, state: _State[T]) -> bool:
        """Start a thread if the queue needs one more; return whether any thread will run the queue."""
        if state.threads >= self._writers or state.idle >= len(state.queue):
            return True
        _at_exit.add(self)
        thread = threading.Thread(target=self._run, args=(state,), name="zcache-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return state.threads > 0
        state.threads += 1
        return True

    def _run(self, state: _State[T], *, until_empty: bool = False) -> None:
        while True:
            with state.changed:
                state.idle += 1
                if not state.queue and not until_empty:
                    state.changed.wait_for(lambda: bool(state.queue), timeout=_IDLE_S)
                state.idle -= 1
                if not state.queue:
                    if not until_empty:
                        state.threads -= 1
                        if state.threads == 0:
                            # Still under the lock: a new thread, and what it uses, can only come afterwards.
                            self._at_rest(False)
                    return
                key = state.queue.popleft()
                job, nbytes = state.jobs[key]
            begun = time.perf_counter()
            try:
                self._work(key, job)
            except Exception as e:  # noqa: BLE001 - the boundary where caching must not stop training; counted there
                self._failed(key, job, e)
            seconds = max(time.perf_counter() - begun, 1e-6)
            del job
            with state.changed:
                del state.jobs[key]
                state.pending_bytes -= nbytes
                rate = nbytes / seconds
                state.bytes_per_s = rate if state.bytes_per_s == 0 else 0.5 * (state.bytes_per_s + rate)
                state.changed.notify_all()


class _AtExit:
    """The pools of this process, to be drained before it exits.

    A multiprocessing finaliser rather than atexit: it runs at the end of worker processes too, which leave through
    ``os._exit``.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._pools: weakref.WeakSet[WriterPool[Any]] = weakref.WeakSet()

    def add(self, pool: WriterPool[Any]) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._pools = weakref.WeakSet()
            util.Finalize(None, self._finish, exitpriority=100)
        self._pools.add(pool)  # threads hold a reference too: a pool with jobs is not collected

    def _finish(self) -> None:
        for pool in list(self._pools):
            pool.finish()


_at_exit = _AtExit()


def _in_worker_process() -> bool:
    return multiprocessing.parent_process() is not None
