"""Counters of what a cache did, summed over the worker processes that share it."""

from __future__ import annotations

import multiprocessing.sharedctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

__all__ = ["SKIP_REASONS", "WHOLE_REASONS", "CacheStats", "Counters"]

SKIP_REASONS = {
    "unstorable": "the item holds a value that the format cannot express",
    "unkeyable": "no stable key can be made from the item",
    "changed": "a source file, a transform or a switch changed while the item was computed",
    "nothing_to_cache": "no part of the pipeline is cached",
    "read_only": "the cache is opened read-only, or its file system is",
    "no_space": "the disk or the quota is full",
    "permission": "no permission to write",
    "io_error": "the file system refused",
    "memory": "not enough memory for a copy of the item",
    "internal": "an error inside zcache: please report it",
}
"""Why an item was returned without being stored."""

WHOLE_REASONS = {
    "crop_unsupported": "the crop is lazy, chosen among others, or of a class that is not known here",
    "crop_item": "the item is not a dict of tensors as the crop expects it",
    "crop_values": "the crop needs the values of what it cuts",
    "crop_box": "the crop pads, or returns something else than a box",
    "no_index": "the voxels that the crop chooses from were not indexed yet, or cannot be",
}
"""Why a hit was read whole although a random crop follows."""

_COUNTERS = (
    "hits",
    "misses",
    "inflight_hits",
    "memory_hits",
    "pushed_down",
    "stored",
    "already_stored",
    "indexed",
    "not_indexed",
    "memory_filled",
    "memory_evicted",
    "memory_refused",
    "damaged",
    "read_errors",
    "raw_bytes",
    "stored_bytes",
    "wait_s",
)
_TROUBLES = ("damaged", "read_errors", "not_indexed", "memory_off", "memory_full")
_NOTED = tuple(f"noted {kind}" for kind in (*SKIP_REASONS, *_TROUBLES, "versions"))
_COLUMNS = {name: i for i, name in enumerate((*_COUNTERS, *SKIP_REASONS, *WHOLE_REASONS, *_NOTED))}
_ROWS = 512  # processes alive at the same time write to different rows


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A reading of the counters.

    Attributes
    ----------
    hits : int
        Items read from the disk.
    inflight_hits : int
        Items served from memory because they were still being written.
    memory_hits : int
        Items read from the memory that all processes of the node share.
    misses : int
        Items that had to be computed.
    pushed_down : int
        Hits, wherever, of which only what a random crop keeps was read.
    stored : int
        Entries written and published.
    already_stored : int
        Entries written although another process had published the same one meanwhile; theirs stayed.
    indexed, not_indexed : int
        Entries to which an index was added of the voxels that a label-guided crop chooses from; attempts that failed.
    memory_filled, memory_evicted, memory_refused : int
        Files put into shared memory, with the indexes; given up for others; left out because they did not fit.
    damaged : int
        Entries that were found torn, truncated or foreign; each on disk is also a miss, and is replaced.
    read_errors : int
        Reads that the file system refused; each is also a miss.
    skipped : mapping of str to int
        Items returned without being stored, by reason (`SKIP_REASONS` explains each).
    read_whole : mapping of str to int
        Hits that were read whole although a random crop follows, by reason (`WHOLE_REASONS` explains each).
    raw_bytes, stored_bytes : int
        Size of what was stored: in memory, and on disk.
    wait_s : float
        Seconds that calls waited because the writers were behind.
    """

    hits: int = 0
    misses: int = 0
    inflight_hits: int = 0
    memory_hits: int = 0
    pushed_down: int = 0
    stored: int = 0
    already_stored: int = 0
    indexed: int = 0
    not_indexed: int = 0
    memory_filled: int = 0
    memory_evicted: int = 0
    memory_refused: int = 0
    damaged: int = 0
    read_errors: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    wait_s: float = 0.0
    skipped: Mapping[str, int] = field(default_factory=dict)
    read_whole: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        ratio = f" ({self.raw_bytes / self.stored_bytes:.1f} x smaller)" if self.stored_bytes else ""
        lines = [
            f"{self.hits} hits, {self.inflight_hits} served while being written, {self.misses} misses",
        ]
        if self.stored:
            lines.append(
                f"{self.stored} stored: {_mib(self.raw_bytes)} in memory, {_mib(self.stored_bytes)} on disk{ratio}"
            )
            lines.append(f"{self.wait_s:.2f} s waited for the writers")
        if self.memory_hits or self.memory_filled or self.memory_refused:
            lines.append(
                f"memory: {self.memory_hits} hits, {self.memory_filled} files filled, {self.memory_evicted} given up, "
                f"{self.memory_refused} times no room"
            )
        if self.pushed_down:
            lines.append(f"{self.pushed_down} hits read in part, only what a random crop keeps")
        lines += [f"{n} hits read whole: {WHOLE_REASONS[reason]}" for reason, n in self.read_whole.items()]
        if self.not_indexed:
            lines.append(f"{self.not_indexed} entries without an index of the voxels that crops choose from")
        if self.damaged or self.read_errors:
            lines.append(f"{self.damaged} damaged entries, {self.read_errors} read errors: recomputed")
        lines += [f"{n} times not stored: {SKIP_REASONS[reason]}" for reason, n in self.skipped.items()]
        return "\n".join(lines)


class Counters:
    """Counters in memory that forked and spawned worker processes share with their parent.

    Each process adds to a row of its own, so that no lock is needed that a killed worker could keep; two processes
    alive at the same time whose ids are equal modulo 512 may lose a count. A copy that is pickled other than to start
    a process counts by itself.
    """

    def __init__(self) -> None:
        self._shared: Any = _shared_array()
        self._attach()

    def _attach(self) -> None:
        self._table = np.frombuffer(self._shared, np.float64).reshape(_ROWS, len(_COLUMNS))
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can be handed over only while a process is being started.
        return {"shared": self._shared if get_spawning_popen() is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shared = _shared_array() if state["shared"] is None else state["shared"]
        self._attach()

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        if self._pid != os.getpid():  # forked: another thread of the parent may have held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
        row = self._table[self._pid % _ROWS]
        with self._lock:
            for name, amount in amounts.items():
                row[_COLUMNS[name]] += amount

    def is_first(self, kind: str) -> bool:
        """Whether no process has asked this of the kind of trouble before: who warns, so that not every worker does."""
        name = f"noted {kind}"
        first = not self._table[:, _COLUMNS[name]].any()
        self.add(**{name: 1})
        return first

    def read(self) -> CacheStats:
        """Return the sums over all processes."""
        sums = dict(zip(_COLUMNS, self._table.sum(axis=0).tolist(), strict=True))
        skipped = {reason: int(sums[reason]) for reason in SKIP_REASONS if sums[reason]}
        read_whole = {reason: int(sums[reason]) for reason in WHOLE_REASONS if sums[reason]}
        counts = {name: int(sums[name]) for name in _COUNTERS if name != "wait_s"}
        return CacheStats(**counts, wait_s=sums["wait_s"], skipped=skipped, read_whole=read_whole)


def _shared_array() -> Any:
    return multiprocessing.sharedctypes.RawArray("d", _ROWS * len(_COLUMNS))


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
