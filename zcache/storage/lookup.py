"""Where an item is: waiting to be written, in memory, on disk; and what it means if it cannot be read there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from zcache.errors import EntryDamagedError
from zcache.stats import Counters
from zcache.storage.entry import Entry, OpenEntries, StoredEntry
from zcache.storage.ram import RamTier
from zcache.storage.recorder import Recorder
from zcache.storage.store import Store
from zcache.troubles import Troubles

__all__ = ["Lookup"]

D = TypeVar("D")
T = TypeVar("T")

# Something else bears the name: a link, a directory, a socket or a device.
_FOREIGN: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})


class Lookup:
    """Finds items of one process, the fastest place first.

    Parameters
    ----------
    store, entries : Store, OpenEntries
        The disk, and the entries on it that are open; None without a disk.
    ram : RamTier
        The memory; None without.
    recorder : Recorder
        Holds what waits to be written.
    counters, troubles
        Who is told of what happens.
    """

    def __init__(
        self,
        store: Store | None,
        entries: OpenEntries | None,
        ram: RamTier | None,
        recorder: Recorder,
        counters: Counters,
        troubles: Troubles,
    ) -> None:
        self._disk = None if store is None or entries is None else (store, entries)
        self._ram = ram
        self._recorder = recorder
        self._counters = counters
        self._troubles = troubles

    def using(self, key: str, read: Callable[[Entry], T], default: D) -> T | D:
        """Return what a function reads from an item, or `default` on a miss: see `zcache.Cache.using`."""
        self._troubles.report()
        pending = self._recorder.pending(key)
        if pending is not None:
            found = read(pending)
            self._counters.add(inflight_hits=1)
            return found
        if self._ram is not None:
            held = self._from_memory(self._ram, key, read)
            if held is not None:
                return held[0]
        stored = None if self._disk is None else self._from_disk(*self._disk, key, read)
        if stored is not None:
            return stored[0]
        self._counters.add(misses=1)
        self._troubles.report()
        return default

    def has(self, key: str) -> bool:
        """Whether there is an item of this key, be it damaged."""
        if self._recorder.pending(key) is not None:  # first: what is written meanwhile is in memory by then
            return True
        return (self._ram is not None and self._ram.has(key)) or self._below(key) is not None

    def _from_memory(self, ram: RamTier, key: str, read: Callable[[Entry], T]) -> tuple[T] | None:
        """Read from an item in memory; None if it is not there, or cannot be believed."""
        entry = ram.open(key, lambda: self._below(key))
        if entry is None:
            return None
        try:
            found = read(entry)
        except EntryDamagedError as e:
            ram.forget(key)
            self._counters.add(damaged=1)
            self._troubles.note("damaged", f"the item {key} in memory is damaged and is filled anew", e)
            return None
        except (OSError, MemoryError):  # no fault of the item, which stays for the others
            return None
        self._counters.add(memory_hits=1)
        return (found,)

    def _below(self, key: str) -> StoredEntry | None:
        """Open the entry on disk of an item that is in memory."""
        if self._disk is None:
            return None
        try:
            return self._disk[1].open(key)[0]
        except OSError:  # damaged too: the item in memory is whole all the same
            self._disk[1].forget(key)
            return None

    def _from_disk(self, store: Store, entries: OpenEntries, key: str, read: Callable[[Entry], T]) -> tuple[T] | None:
        """Read from an entry on disk; None if it is not there, or something is wrong with it."""
        kept = False
        try:
            entry, kept = entries.open(key)
            held = None if self._ram is None else self._ram.promote(key, entry, lambda: self._below(key))
            found = read(held or entry)
        except FileNotFoundError:
            entries.forget(key)  # never written, or removed by somebody meanwhile
            return None
        except (EntryDamagedError, OSError, MemoryError) as e:
            entries.forget(key)
            if kept:  # another process may have replaced it since it was opened
                return self._from_disk(store, entries, key, read)
            self._cannot_read(store.entry_path(key), key, e)
            return None
        self._counters.add(hits=1)
        return (found,)

    def _cannot_read(self, path: Path, key: str, error: Exception) -> None:
        if isinstance(error, EntryDamagedError):
            self._recorder.mark_damaged(key)
            self._counters.add(damaged=1)
            self._troubles.note("damaged", f"the entry {path} is damaged and is recomputed", error)
            return
        if getattr(error, "errno", 0) in _FOREIGN:
            self._recorder.mark_damaged(key)
        self._counters.add(read_errors=1)
        self._troubles.note("read_errors", f"the entry {path} cannot be read and is recomputed", error)
