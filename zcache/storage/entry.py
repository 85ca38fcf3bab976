"""Entries opened for reading, and the few of them that a process keeps open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from zcache.encoding.array_layout import ArrayRecord
from zcache.encoding.chunking import Region, check_region
from zcache.encoding.layout import EntryRecord, parse_entry
from zcache.encoding.payload import Json
from zcache.errors import EntryDamagedError
from zcache.keys import digest
from zcache.storage.reader import Shard
from zcache.storage.recent import Recent
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads

__all__ = ["Entry", "OpenEntries", "StoredEntry", "child_name"]

_MAX_DOCUMENTS = 256
_MAX_DOCUMENT_BYTES = 8 * 1024 * 1024  # parsed, JSON takes several times its bytes
_MAX_SHARDS = 64  # file descriptors: far below the 256 that some systems allow


class Entry(Protocol):
    """An item that can be read in parts, wherever its arrays are."""

    @property
    def tree(self) -> Json:
        """The payload tree."""

    def describe(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of an array, as it is read."""

    def read(self, name: str, region: Region | None = None) -> np.ndarray:
        """Read an array or a box of it; what is returned is the caller's."""

    def read_boxes(self, name: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Read several boxes of an array."""

    def child(self, what: Json, arrays: Sequence[str]) -> Entry | None:
        """Open the group that was worked out from arrays of the item and added to it; None if there is none."""


class StoredEntry:
    """An entry on disk.

    Parameters
    ----------
    record : EntryRecord
        What its document says.
    open_shard : callable
        ``open_shard(name, record)`` opens one of its arrays.
    open_child : callable
        ``open_child(name)`` opens a group that was added to it, or raises FileNotFoundError.
    """

    def __init__(
        self,
        record: EntryRecord,
        open_shard: Callable[[str, ArrayRecord], Shard],
        open_child: Callable[[str], StoredEntry],
    ) -> None:
        self.record = record
        self._open_shard = open_shard
        self._open_child = open_child

    @property
    def tree(self) -> Json:
        """The payload tree."""
        return self.record.tree

    def describe(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of an array, as it is read."""
        array = self._array(name)
        return array.grid.shape, array.narrowing.dtype

    def read(self, name: str, region: Region | None = None) -> np.ndarray:
        """Read an array or a box of it.

        Raises
        ------
        EntryDamagedError
            The entry has no such array, or it is not what the document says.
        IndexError
            `region` does not lie inside the array.
        """
        return self._shard(name, [region]).read(region)

    def read_codes(self, name: str) -> np.ndarray:
        """Read an array as it is stored, without turning codes into values; raises as `read` does."""
        return self._shard(name, ()).read(restored=False)

    def read_boxes(self, name: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Read several boxes of an array, decoding chunks that they share once; raises as `read` does."""
        return self._shard(name, regions).read_boxes(regions)

    def child(self, what: Json, arrays: Sequence[str]) -> StoredEntry | None:
        """Open the group that was worked out from arrays of the item and added to it; None if there is none.

        Raises
        ------
        EntryDamagedError
            The entry has no such arrays, or the group cannot be believed.
        """
        try:
            return self._open_child(child_name(what, [self._array(name) for name in arrays]))
        except FileNotFoundError:
            return None

    def _shard(self, name: str, regions: Sequence[Region | None]) -> Shard:
        array = self._array(name)
        for region in regions:
            check_region(name, region, array.grid.shape)
        try:
            return self._open_shard(name, array)
        except FileNotFoundError as e:
            raise EntryDamagedError(f"the shard of its array {name!r} is missing") from e

    def _array(self, name: str) -> ArrayRecord:
        array = self.record.arrays.get(name)
        if array is None:
            raise EntryDamagedError(f"it has no array {name!r}")
        return array


class OpenEntries:
    """The documents and files that one process keeps, the least recently used given up first.

    A file is closed when it is given up and its last reader is done.

    Parameters
    ----------
    store : Store
        Where the entries lie.
    threads : ReadThreads
        What decodes.
    """

    def __init__(self, store: Store, threads: ReadThreads) -> None:
        self._store = store
        self._threads = threads
        self._documents: Recent[tuple[str, str], EntryRecord] = Recent(_MAX_DOCUMENTS, _MAX_DOCUMENT_BYTES)
        self._shards: Recent[tuple[str, str, str], Shard] = Recent(_MAX_SHARDS, _MAX_SHARDS)

    def open(self, key: str) -> tuple[StoredEntry, bool]:
        """Open an entry.

        Returns
        -------
        entry : StoredEntry
            The entry.
        kept : bool
            Whether its document was kept from before. If reading from it fails, another process may have replaced the
            entry: `forget` it and open it again.

        Raises
        ------
        FileNotFoundError
            There is no such entry.
        EntryDamagedError, OSError
            Its document cannot be read or believed.
        """
        kept = self._documents.get((key, "")) is not None
        return self._open(key, ""), kept

    def close(self) -> None:
        """Give all of them up."""
        self._documents.drop(lambda _: True)
        self._shards.drop(lambda _: True)

    def forget(self, key: str) -> None:
        """Give an entry up."""
        self._documents.drop(lambda kept: kept[0] == key)
        self._shards.drop(lambda kept: kept[0] == key)

    def _open(self, key: str, child: str) -> StoredEntry:
        record = self._documents.get((key, child))
        if record is None:
            data = self._store.read_document(key, child)
            record = parse_entry(data)
            self._documents.put((key, child), record, len(data))
        return StoredEntry(
            record, lambda name, array: self._shard(key, child, name, array), lambda name: self._open(key, name)
        )

    def _shard(self, key: str, child: str, name: str, array: ArrayRecord) -> Shard:
        shard = self._shards.get((key, child, name))
        if shard is None or shard.record is not array:
            fd = self._store.open_shard(key, name, len(array.grid.shape), child, is_label=array.is_label)
            shard = Shard(fd, array, self._threads)
            self._shards.put((key, child, name), shard, 1)
        return shard


def child_name(what: Json, arrays: Sequence[ArrayRecord]) -> str:
    """Name the group of what is worked out from arrays: another one for other parameters, and for other shards.

    So a group that was added to an entry is never taken for one of the entry that replaced it.

    Parameters
    ----------
    what : Json
        What it is, with every parameter.
    arrays : sequence of ArrayRecord
        The arrays that it is worked out from.
    """
    return "voxels-" + digest([what, [[array.seal, array.index_crc32c, array.shard_nbytes] for array in arrays]])[:16]
