"""Threads that decode one read together: few, only where asked for, never inside worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ReadThreads", "cpu_count"]

T = TypeVar("T")


class ReadThreads:
    """Runs the parts of a read side by side.

    Threads start with the first read of a process that has several parts. A process that was forked has its own.

    Parameters
    ----------
    n_threads : int
        Threads at most. Never more than the CPUs that this process may use; in a worker process, which shares them
        with its siblings, one: the caller's own.
    """

    def __init__(self, n_threads: int = 1) -> None:
        self._n_threads = n_threads
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        in_worker = multiprocessing.parent_process() is not None
        self.count = 1 if in_worker else max(1, min(self._n_threads, cpu_count()))
        self._pid = os.getpid()  # last: another thread of a forked child takes the rest for its own from here on

    def run(self, work: Callable[[Sequence[T]], None], parts: Sequence[T]) -> None:
        """Call `work` with the parts, all at once or divided among the threads; return when all are done.

        Parameters
        ----------
        work : callable
            ``work(parts)`` must be safe to run beside itself.
        parts : sequence
            In the order in which neighbours go well together.

        Raises
        ------
        Exception
            What `work` raised first, in the order of the parts.
        """
        if self._n_threads > 1 and self._pid != os.getpid():  # before the lock: the parent may have held it
            self._reset()
        n = min(self.count, len(parts))
        if n <= 1:
            work(parts)
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count - 1, "zcache-reader")
        ends = [len(parts) * (i + 1) // n for i in range(n)]
        others = [self._pool.submit(work, parts[a:b]) for a, b in itertools.pairwise(ends)]
        try:
            work(parts[: ends[0]])
        finally:
            failed = [error for error in (other.exception() for other in others) if error is not None]
        if failed:
            raise failed[0]


def cpu_count() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1
