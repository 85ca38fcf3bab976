"""Indexes of voxels: sets that are worked out from arrays of an entry, kept beside them, read one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from zcache.encoding.narrowing import LOSSLESS
from zcache.encoding.payload import ArrayLeaf, EncodedItem, decode_item, encode_item
from zcache.encoding.voxels import BLOCK_NBYTES, PackedSets, VoxelQuery, VoxelSet
from zcache.errors import EntryDamagedError
from zcache.storage.entry import Entry, StoredEntry, child_name
from zcache.storage.store import Store
from zcache.storage.writer import WriteSettings, write_child

__all__ = ["add_sets", "find_sets", "open_sets"]

_BITS: Final = "bits"


def find_sets(query: VoxelQuery, read: Callable[[str], np.ndarray]) -> EncodedItem:
    """Find sets of voxels.

    Parameters
    ----------
    query : VoxelQuery
        Which sets.
    read : callable
        ``read(name)`` returns an array of the entry.

    Returns
    -------
    EncodedItem
        As it is stored: their bits, and how many there are up to the end of each block of bits.

    Raises
    ------
    UnstorableError
        There are too many sets for a volume of this size.
    """
    packed = PackedSets.pack(query.n_voxels, query.find(read))
    ends = encode_item({"ends": packed.ends})
    return EncodedItem(ends.tree, (*ends.leaves, ArrayLeaf(_BITS, packed.bits)))


def add_sets(
    store: Store,
    key: str,
    entry: StoredEntry,
    query: VoxelQuery,
    settings: WriteSettings,
    find: Callable[[], EncodedItem],
) -> int:
    """Add sets of voxels to an entry, unless it has them.

    Parameters
    ----------
    store, key, entry : Store, str, StoredEntry
        The entry, as it is published.
    query : VoxelQuery
        Which sets.
    settings : WriteSettings
        Compressor of the entry.
    find : callable
        Returns what `find_sets` does.

    Returns
    -------
    int
        Bytes added to the store.

    Raises
    ------
    EntryDamagedError, OSError
        The entry cannot be read, or the file system refuses a step; nothing is added then.
    """
    if entry.child(query.what, query.arrays) is not None:
        return 0
    name = child_name(query.what, [entry.record.arrays[array] for array in query.arrays])
    # One block of one set is one chunk: what is read to pick a voxel.
    by_block = replace(settings, chunks=(BLOCK_NBYTES,), precision=LOSSLESS)
    published, stored_bytes = write_child(store, key, name, find(), by_block, {"voxels": query.what})
    return stored_bytes if published else 0


def open_sets(entry: Entry, query: VoxelQuery) -> list[VoxelSet] | None:
    """Open sets of voxels of an entry; None if it lacks them.

    Raises
    ------
    EntryDamagedError
        They cannot be believed.
    OSError
        They cannot be read.
    """
    child = entry.child(query.what, query.arrays)
    if child is None:
        return None
    content = decode_item(child.tree, child.read)
    ends = content.get("ends") if isinstance(content, dict) else None
    shape, dtype = child.describe(_BITS)
    if not isinstance(ends, np.ndarray) or ends.ndim != 2 or ends.dtype != np.uint64:  # noqa: PLR2004
        raise EntryDamagedError("its index of voxels has no counts")
    if dtype != np.uint8 or shape != (ends.shape[0], ends.shape[1] * BLOCK_NBYTES):
        raise EntryDamagedError("the bits and the counts of its index of voxels disagree")

    def block_of(row: int) -> Callable[[int], np.ndarray]:
        def read_block(i: int) -> np.ndarray:
            return child.read(_BITS, ((row, row + 1), (i * BLOCK_NBYTES, (i + 1) * BLOCK_NBYTES))).reshape(-1)

        return read_block

    return [VoxelSet(query.n_voxels, row, block_of(i)) for i, row in enumerate(ends)]
