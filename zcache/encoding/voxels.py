"""Sets of voxels of a volume that can be counted and picked from without being listed: rank and select on bits.

MONAI's label-guided crops list the flat index of every foreground and background voxel (8 bytes each, 160 MB for a CT)
and then take a few of them at random. They only ever ask how many there are and which is the i-th. One bit for each
voxel, with the number of members up to the end of each block of bits, answers both: the block is found by bisection
among the counts, and the bit inside it by counting again (G. Jacobson, Space-efficient static trees and graphs,
FOCS 1989). Stored as chunks of one block each, picking a voxel reads and decodes one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding.payload import Json
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = ["BLOCK_NBYTES", "PackedSets", "VoxelQuery", "VoxelSet"]

BLOCK_NBYTES = 16 * 1024
"""Bytes of a block: 131,072 voxels, a few KB once it is compressed."""

_MAX_PACKED_BYTES = 512 * 1024 * 1024
_WORD = np.dtype("<u8")


@dataclass(frozen=True, slots=True, eq=False)
class VoxelQuery:
    """Sets of voxels that can be worked out from arrays of an entry.

    Attributes
    ----------
    what : Json
        Tells these sets from others: what they are, and every parameter that they depend on.
    arrays : tuple of str
        The arrays of the entry that they are worked out from.
    n_voxels : int
        Voxels of the volume.
    find : callable
        ``find(read)`` yields (start, members) for consecutive ranges of voxels that begin at multiples of 8: `members`
        holds for each set the ascending indices, counted from `start`, of its voxels in that range. ``read(name)``
        returns an array, not to be changed.
    """

    what: Json
    arrays: tuple[str, ...]
    n_voxels: int
    find: Callable[[Callable[[str], np.ndarray]], Iterable[tuple[int, Sequence[np.ndarray]]]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedSets:
    """Sets of voxels as they are stored.

    Attributes
    ----------
    bits : numpy.ndarray
        uint8 of shape (sets, bytes): voxel i is bit i % 8, from the lowest, of byte i // 8; whole blocks.
    ends : numpy.ndarray
        uint64 of shape (sets, blocks): members up to the end of each block.
    """

    bits: np.ndarray
    ends: np.ndarray

    @classmethod
    def pack(cls, n_voxels: int, found: Iterable[tuple[int, Sequence[np.ndarray]]]) -> PackedSets:
        """Pack what a `VoxelQuery` finds.

        Raises
        ------
        UnstorableError
            The bits would take more than 512 MiB.

        Examples
        --------
        >>> packed = PackedSets.pack(20, [(0, [np.array([3, 4])]), (16, [np.array([1])])])
        >>> packed.bits[0, :3].tolist(), packed.ends.tolist()
        ([24, 0, 2], [[3]])
        """
        n_blocks = -(-n_voxels // (8 * BLOCK_NBYTES))
        bits: np.ndarray | None = None
        for start, members in found:
            if bits is None:
                if len(members) * n_blocks * BLOCK_NBYTES > _MAX_PACKED_BYTES:
                    raise UnstorableError(f"an index of {len(members)} sets of {n_voxels} voxels takes too much memory")
                bits = np.zeros((len(members), n_blocks * BLOCK_NBYTES), np.uint8)
            for row, indices in zip(bits, members, strict=True):
                if len(indices):
                    mask = np.zeros(int(indices[-1]) + 1, np.bool_)
                    mask[indices] = True
                    packed = np.packbits(mask, bitorder="little")
                    row[start // 8 : start // 8 + packed.size] = packed
        if bits is None:
            bits = np.zeros((0, n_blocks * BLOCK_NBYTES), np.uint8)
        counts = _counts(bits.reshape(len(bits), n_blocks, BLOCK_NBYTES)).sum(axis=-1, dtype=np.uint64)
        return cls(bits, np.cumsum(counts, axis=-1, dtype=np.uint64))


class VoxelSet:
    """One set of voxels, in ascending order of their flat index (C order): `len` and the i-th member.

    Not a `collections.abc.Sequence`: MONAI would turn one into an array of all its members.

    Parameters
    ----------
    n_voxels : int
        Voxels of the volume.
    ends : numpy.ndarray
        Members up to the end of each block.
    read_block : callable
        ``read_block(i)`` returns the bytes of a block.

    Raises
    ------
    EntryDamagedError
        The counts cannot be those of such a volume, or a block does not hold what they say.

    Examples
    --------
    >>> packed = PackedSets.pack(20, [(0, [np.array([3, 4, 17])])])
    >>> voxels = VoxelSet(20, packed.ends[0], lambda i: packed.bits[0, i * BLOCK_NBYTES : (i + 1) * BLOCK_NBYTES])
    >>> len(voxels), voxels[0], voxels[2], voxels[-1]
    (3, 3, 17, 17)
    """

    def __init__(self, n_voxels: int, ends: np.ndarray, read_block: Callable[[int], np.ndarray]) -> None:
        self._n_voxels = n_voxels
        self._ends = ends
        self._read_block = read_block
        if not ends.size or int(ends[-1]) > n_voxels or (ends[1:] < ends[:-1]).any():
            raise EntryDamagedError("the counts of an index of voxels are not those of this volume")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: Any) -> int:
        wanted = operator.index(i)
        if wanted < 0:
            wanted += len(self)
        if not 0 <= wanted < len(self):
            raise IndexError(f"{i} is not the place of one of {len(self)} voxels")
        block = int(np.searchsorted(self._ends, wanted, side="right"))
        before = int(self._ends[block - 1]) if block else 0
        bytes_ = self._read_block(block)
        upto = np.cumsum(_counts(bytes_), dtype=np.uint64)
        if upto[-1] != self._ends[block] - np.uint64(before):
            raise EntryDamagedError("a block of an index of voxels does not hold as many as it should")
        word = int(np.searchsorted(upto, wanted - before, side="right"))
        rank = wanted - before - (int(upto[word - 1]) if word else 0)
        start = word * _WORD.itemsize
        members = np.flatnonzero(np.unpackbits(bytes_[start : start + _WORD.itemsize], bitorder="little"))
        voxel = 8 * (block * BLOCK_NBYTES + start) + int(members[rank])
        if voxel >= self._n_voxels:
            raise EntryDamagedError("an index of voxels points beyond its volume")
        return voxel


def _counts(bits: np.ndarray) -> np.ndarray:
    """Return how many bits are set in each eight bytes along the last axis."""
    return np.bitwise_count(bits.view(_WORD))
