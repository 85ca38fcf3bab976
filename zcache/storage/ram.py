"""The tier of uncompressed items in memory: one copy for all processes of a node, in front of the disk or alone.

An item is one file in a `SharedDirectory`, named by its key, its arrays in their narrow types. Reading copies what is
asked for out of the mapped file and restores its type on the way. Whatever memory refuses, the tiers below serve.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Self

import numpy as np

from zcache.encoding.chunking import Region, check_region
from zcache.encoding.narrowing import Narrowing, narrow
from zcache.encoding.payload import EncodedItem, Json
from zcache.encoding.ramfile import RamArray, RamFile, RamPlan, parse_head, parse_ram_file, plan_ram_file
from zcache.encoding.restoring import restore
from zcache.encoding.rows import contiguous
from zcache.errors import CacheConfigError, EntryDamagedError, ZCacheError
from zcache.keys import digest
from zcache.stats import Counters
from zcache.storage.entry import Entry, StoredEntry
from zcache.storage.recent import Recent
from zcache.storage.room import available_memory_bytes
from zcache.storage.shm import Identity, NoMemoryError, SharedDirectory, default_memory_dir
from zcache.troubles import Troubles
from zcache.units import parse_bytes

__all__ = ["MemorySettings", "RamEntry", "RamTier"]

_MAX_MAPPINGS = 4096
_MAX_DOCUMENT_BYTES = 8 * 1024 * 1024  # parsed, JSON takes several times its bytes
_LEAVE_LAST = -100
"""After the writer pools, which put their last items in before; and, being negative, after the exiting process has
terminated its daemonic children, such as workers of a DataLoader, which take part as well and remove nothing."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How much memory the tier may take, and where.

    Attributes
    ----------
    max_bytes : int or None
        For all processes of the node together; None: half of what is available.
    directory : path or None
        Where the files lie; None: ``/dev/shm``, or where there is none, the directory for temporary files.
    keep : bool
        Leave the items in memory for the next run when the last process leaves.
    copy : bool
        Give arrays that belong to the caller. If false, arrays that need no other type are views of the shared memory:
        copy-on-write, so that what is written to them is seen by nobody else.
    """

    max_bytes: int | None
    directory: Path | None = None
    keep: bool = False
    copy: bool = True

    @classmethod
    def parse(
        cls, memory: int | str, directory: str | os.PathLike[str] | None, *, keep: bool = False, copy: bool = True
    ) -> Self:
        """Read the options of a cache.

        Raises
        ------
        CacheConfigError
            `memory` is neither a number of bytes nor ``"auto"``, or `directory` is none.
        """
        place = None if directory is None else Path(directory)
        if place is not None and not place.is_dir():
            raise CacheConfigError(f"memory_dir={str(place)!r} is no directory: name one on a file system in memory")
        return cls(None if memory == "auto" else parse_bytes(memory, "memory"), place, keep, copy)


class RamTier:
    """One process's part in the shared memory.

    Parameters
    ----------
    settings : MemorySettings
        How much, and where.
    counters, troubles
        Who is told of what happens.
    alone : bool
        There is no disk below: what does not fit has to be computed each time.
    """

    def __init__(
        self, settings: MemorySettings, counters: Counters, troubles: Troubles, *, alone: bool = False
    ) -> None:
        self._settings = settings
        self._alone = alone
        self._counters = counters
        self._troubles = troubles
        self._lock = threading.Lock()
        self._directory: SharedDirectory | None = None
        self._leave: util.Finalize | None = None
        self._is_off = False
        _tiers.add(self)
        self._kept: Recent[str, _Mapped] = Recent(_max_mappings(), _MAX_DOCUMENT_BYTES)
        self._n_evicted = 0

    def join(self) -> None:
        """Take part from now on: what is in memory stays there until the last process has left."""
        self._joined()

    def open(self, key: str, below: Callable[[], StoredEntry | None]) -> RamEntry | None:
        """Open an item; None if memory does not have it.

        Parameters
        ----------
        key : str
            Its key.
        below : callable
            ``below()`` opens the same item on disk, for the groups that were added to it there.
        """
        return self._open(key, key, below)

    def fill(self, key: str, item: EncodedItem, narrowings: Mapping[str, Narrowing]) -> None:
        """Put an item into memory, if it fits.

        Parameters
        ----------
        key : str
            Its key.
        item : EncodedItem
            The tree, and codes.
        narrowings : mapping of str to Narrowing
            How the codes of each array become values again.

        Raises
        ------
        UnstorableError
            Its document would be longer than a reader believes.
        """
        plan = plan_ram_file(item.tree, [(leaf.name, leaf.array.shape, narrowings[leaf.name]) for leaf in item.leaves])
        arrays = {leaf.name: leaf.array for leaf in item.leaves}
        self._write(key, plan, arrays.__getitem__)

    def has(self, key: str) -> bool:
        """Whether memory has an item."""
        return self._has(key)

    def promote(self, key: str, entry: StoredEntry, below: Callable[[], StoredEntry | None]) -> RamEntry | None:
        """Put an item that is on disk into memory and open it there; None if it does not fit.

        Raises
        ------
        EntryDamagedError
            The entry on disk is damaged.
        OSError
            The entry on disk cannot be read.
        """
        return self._promote(key, key, entry, below)

    def has_sets(self, key: str, what: Json) -> bool:
        """Whether memory has the sets of voxels that `what` tells from others."""
        return self._has(_child_name(key, what))

    def add_sets(self, key: str, what: Json, item: EncodedItem) -> None:
        """Put sets of voxels of an item into memory, if they fit."""
        narrowed = {leaf.name: narrow(leaf.array) for leaf in item.leaves}
        plan = plan_ram_file(item.tree, [(name, codes.shape, how) for name, (codes, how) in narrowed.items()])
        self._write(_child_name(key, what), plan, lambda name: narrowed[name][0])

    def forget(self, key: str) -> None:
        """Remove an item from memory."""
        directory = self._joined()
        self._kept.drop(lambda name: name == key)
        if directory is not None:
            with contextlib.suppress(OSError):
                directory.discard(key)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the items in memory, in no particular order."""
        directory = self._joined()
        return iter(()) if directory is None else (name for name in directory.names() if "." not in name)

    def close(self) -> None:
        """Leave; the last process to do so removes what is there, unless it is to be kept. May be used again."""
        with self._lock:
            leave, self._leave, self._directory = self._leave, None, None
        self._kept.drop(lambda _: True)
        if leave is not None:
            leave()

    def _has(self, name: str) -> bool:
        directory = self._joined()
        with contextlib.suppress(OSError):
            return directory is not None and directory.identify(name) is not None
        return False

    def _joined(self) -> SharedDirectory | None:
        if self._directory is not None or self._is_off:
            return self._directory
        with self._lock:
            if self._directory is None and not self._is_off:
                try:
                    self._directory = self._new_directory()
                except (ZCacheError, OSError) as e:
                    self._is_off = True
                    self._troubles.note("memory_off", "nothing is cached in memory", e)
        return self._directory

    def _new_directory(self) -> SharedDirectory:
        settings = self._settings

        def budget(used_bytes: int) -> int:
            if settings.max_bytes is not None:
                return settings.max_bytes
            return (available_memory_bytes() + used_bytes) // 2

        directory = SharedDirectory(settings.directory or default_memory_dir(), budget, keep=settings.keep)
        # At the end of worker processes too, which leave through os._exit; and when the tier is dropped.
        self._leave = util.Finalize(self, directory.leave, exitpriority=_LEAVE_LAST)
        capacity = directory.capacity_bytes()
        if settings.max_bytes is not None and capacity < settings.max_bytes:
            note = f"memory= allows {settings.max_bytes} bytes, {directory.path.parent} has room for {capacity}"
            how = "a container gets more with --shm-size, and memory_dir= names another place"
            self._troubles.note("memory_full", note, OSError(how))
        return directory

    def _open(self, name: str, key: str, below: Callable[[], StoredEntry | None]) -> RamEntry | None:
        directory = self._joined()
        if directory is None:
            return None
        try:
            self._let_go(directory)
            mapped = self._map(directory, name)
        except EntryDamagedError as e:
            self._counters.add(damaged=1)
            self._troubles.note("damaged", f"{directory.path / name} is damaged and is filled anew", e)
            with contextlib.suppress(OSError):
                directory.discard(name)
            return None
        except (OSError, MemoryError) as e:  # no descriptor or mapping is left, or another thread has closed it
            self._counters.add(read_errors=1)
            self._troubles.note("read_errors", f"{directory.path / name} cannot be read", e)
            return None
        return None if mapped is None else RamEntry(self, key, mapped.file, mapped.mapping, below)

    def _map(self, directory: SharedDirectory, name: str) -> _Mapped | None:
        """Return a file mapped and read; the mapping of before where it is read only."""
        identity, kept = directory.identify(name), self._kept.get(name)
        if kept is not None and kept.identity != identity:
            self._kept.drop(lambda other: other == name)
            kept = None
        if identity is not None:
            directory.touch(name)
        if identity is None or (kept is not None and self._settings.copy):
            return kept
        found = directory.open(name, copy_on_write=not self._settings.copy)
        if found is None:
            return None
        mapping, identity = found
        is_kept = kept is not None and kept.identity == identity  # it may have been replaced since it was looked at
        file = kept.file if kept is not None and is_kept else parse_ram_file(mapping, identity.nbytes)
        mapped = _Mapped(identity, file, mapping)
        self._kept.resize(_max_mappings())
        self._kept.put(name, mapped, parse_head(mapping, identity.nbytes)[0])
        return mapped

    def _let_go(self, directory: SharedDirectory) -> None:
        """Unmap files that have been given up since the last time: their memory is free when all have done so."""
        n_evicted = directory.n_evicted()
        if n_evicted != self._n_evicted:
            self._n_evicted = n_evicted
            self._kept.drop(lambda name: directory.identify(name) is None)

    def _promote(
        self, name: str, key: str, entry: StoredEntry, below: Callable[[], StoredEntry | None]
    ) -> RamEntry | None:
        records = entry.record.arrays
        plan = plan_ram_file(entry.tree, [(n, array.grid.shape, array.narrowing) for n, array in records.items()])
        return self._open(name, key, below) if self._write(name, plan, entry.read_codes) else None

    def _write(self, name: str, plan: RamPlan, codes: Callable[[str], np.ndarray]) -> bool:
        """Write a file, whose codes are read array by array; whether it is there now."""
        directory = self._joined()
        if directory is None or self._has(name):
            return directory is not None
        try:
            new, n_evicted = directory.create(name, plan.nbytes)
        except OSError as e:
            self._full(e)
            return False
        if new is None and self._has(name):  # another process was faster
            return True
        self._counters.add(memory_evicted=n_evicted, memory_refused=new is None)
        if new is None:
            if self._alone:
                used, budget = directory.used_bytes(), directory.budget_bytes
                note = f"the memory for cached items is full ({used} of {budget} bytes): what does not fit is computed"
                how = "give it more with memory=, or keep the rest on disk with PersistentDataset(memory=)"
                self._troubles.note("memory_full", note, OSError(how))
            return False
        with new:
            try:
                for array, place in plan.file.arrays.items():
                    new.write(place.start, codes(array))
                for start, piece in plan.pieces:
                    new.write(start, piece)
                new.publish()
            except NoMemoryError as e:
                self._full(e)
                return False
        self._counters.add(memory_filled=1)
        return True

    def _full(self, error: OSError) -> None:
        self._counters.add(memory_refused=1)
        self._troubles.note("memory_full", "not all that is allowed fits into memory", error)


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """A file that is mapped."""

    identity: Identity
    file: RamFile
    mapping: mmap.mmap


class RamEntry:
    """An item in memory. Made by `RamTier`."""

    def __init__(
        self, tier: RamTier, key: str, file: RamFile, mapping: mmap.mmap, below: Callable[[], StoredEntry | None]
    ) -> None:
        self._tier = tier
        self._key = key
        self._file = file
        self._mapping = mapping
        self._below = below

    @property
    def tree(self) -> Json:
        """The payload tree."""
        return self._file.tree

    def describe(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of an array, as it is read."""
        array = self._array(name)
        return array.shape, array.narrowing.dtype

    def read(self, name: str, region: Region | None = None) -> np.ndarray:
        """Read an array or a box of it.

        Raises
        ------
        EntryDamagedError
            The item has no such array.
        IndexError
            `region` does not lie inside the array.
        """
        array = self._array(name)
        check_region(name, region, array.shape)
        codes, plain = array.codes(self._mapping), array.narrowing.kind == "identity"
        if region is not None:
            codes = contiguous(codes[tuple(slice(start, stop) for start, stop in region)])
        elif plain and self._tier._settings.copy:  # noqa: SLF001 - two halves of one thing
            codes = codes.copy()
        return codes if plain else restore(codes, array.narrowing)

    def read_boxes(self, name: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Read several boxes of an array."""
        return [self.read(name, region) for region in regions]

    def child(self, what: Json, arrays: Sequence[str]) -> Entry | None:
        """Open the group that was worked out from arrays of the item; put it into memory if it is on disk only."""
        name = _child_name(self._key, what)
        found = self._tier._open(name, self._key, self._below)  # noqa: SLF001
        stored = self._below() if found is None else None
        group = None if stored is None else stored.child(what, arrays)
        if group is None:
            return found
        return self._tier._promote(name, self._key, group, self._below) or group  # noqa: SLF001

    def _array(self, name: str) -> RamArray:
        array = self._file.arrays.get(name)
        if array is None:
            raise EntryDamagedError(f"it has no array {name!r}")
        return array


_tiers: weakref.WeakSet[RamTier] = weakref.WeakSet()


def _max_mappings() -> int:
    """Return how many files a tier keeps mapped: before Python 3.13 each takes a file descriptor of the process."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    at_most = min(allowed // 8, _MAX_MAPPINGS) if allowed > 0 else _MAX_MAPPINGS
    return max(1, at_most // max(1, len(_tiers)))


def _child_name(key: str, what: Json) -> str:
    """Name the group of what is worked out from an item, whose key stands for its content."""
    return f"{key}.voxels-{digest([what])[:16]}"
