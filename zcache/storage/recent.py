"""A mapping of bounded size that gives up what was not used for longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """What was used lately, bounded in number and in weight. Safe in threads.

    Parameters
    ----------
    max_size : int
        Number of values at most.
    max_weight : int
        Sum of their weights at most; one value is kept whatever it weighs.
    """

    def __init__(self, max_size: int, max_weight: int) -> None:
        self._max_size = max_size
        self._max_weight = max_weight
        self._lock = threading.Lock()
        self._weight = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return a value, None if it is not there."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Keep a value, in the place of what had its key."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = value, weight
            self._weight += weight - before
            while len(self._values) > self._max_size or (self._weight > self._max_weight and len(self._values) > 1):
                self._weight -= self._values.popitem(last=False)[1][1]

    def resize(self, max_size: int) -> None:
        """Keep another number of values at most, from the next `put` on."""
        self._max_size = max_size

    def drop(self, matches: Callable[[K], bool]) -> None:
        """Give up the values whose key matches."""
        with self._lock:
            for key in [k for k in self._values if matches(k)]:
                self._weight -= self._values.pop(key)[1]
