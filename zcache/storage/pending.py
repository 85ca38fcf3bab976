"""An item that waits to be written: private copies of its arrays, which serve reads meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from zcache.encoding.chunking import Region, check_region
from zcache.encoding.narrowing import LOSSLESS, Narrowing, Precision, narrow
from zcache.encoding.payload import ArrayLeaf, EncodedItem, Json
from zcache.encoding.restoring import restore
from zcache.encoding.voxels import VoxelQuery

__all__ = ["PendingItem"]


@dataclass(frozen=True, slots=True, eq=False)
class PendingItem:
    """A snapshot of an item, with what is to be written about it.

    Attributes
    ----------
    item : EncodedItem
        The tree and private arrays; those named in `narrowings` are codes already.
    about : Json
        For people who look at the entry later.
    narrowings : mapping of str to Narrowing
        How codes become values again. With a lossy precision, arrays are rounded here and not in the background, so
        that a miss returns what a hit will.
    query : VoxelQuery, optional
        Sets of voxels to find once the item is written.
    patch : tuple of int
        Extents along the trailing axes of the patches that will mostly be read, if that is known.
    """

    item: EncodedItem
    about: Json
    narrowings: Mapping[str, Narrowing]
    query: VoxelQuery | None = None
    patch: tuple[int, ...] = ()

    @classmethod
    def snapshot(
        cls,
        item: EncodedItem,
        precision: Precision,
        about: Json,
        query: VoxelQuery | None = None,
        patch: tuple[int, ...] = (),
    ) -> Self:
        """Copy an item, rounded as the precision allows."""
        copied = item.snapshot()
        if precision == LOSSLESS:
            return cls(copied, about, {}, query, patch)
        narrowed = {leaf.name: narrow(leaf.array, precision) for leaf in copied.leaves}
        leaves = tuple(ArrayLeaf(name, codes) for name, (codes, _) in narrowed.items())
        narrowings = {name: how for name, (_, how) in narrowed.items()}
        return cls(EncodedItem(copied.tree, leaves), about, narrowings, query, patch)

    def narrowed(self) -> Self:
        """Return the same item with all its arrays as codes, for more than one place to write them."""
        found = {
            leaf.name: (leaf.array, self.narrowings[leaf.name]) if leaf.name in self.narrowings else narrow(leaf.array)
            for leaf in self.item.leaves
        }
        leaves = tuple(ArrayLeaf(name, codes) for name, (codes, _) in found.items())
        return replace(
            self, item=EncodedItem(self.tree, leaves), narrowings={name: how for name, (_, how) in found.items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays hold."""
        return self.item.nbytes

    @property
    def tree(self) -> Json:
        """The payload tree."""
        return self.item.tree

    def describe(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of an array, as it is read."""
        array, narrowing = self._array(name)
        return array.shape, array.dtype if narrowing is None else narrowing.dtype

    def read(self, name: str, region: Region | None = None) -> np.ndarray:
        """Return an array, or a box of it, as it will be read back, the caller's to keep."""
        array, narrowing = self._array(name)
        check_region(name, region, array.shape)
        part = array if region is None else array[tuple(slice(a, b) for a, b in region)]
        return np.array(part, order="C") if narrowing is None else restore(part, narrowing)

    def read_boxes(self, name: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Return several boxes of an array."""
        return [self.read(name, region) for region in regions]

    def child(self, what: Json, arrays: Sequence[str]) -> None:
        """Return None: nothing is added to an item before it is written."""

    def peek(self, name: str) -> np.ndarray:
        """Return an array as it will be read back, not to be changed: without a copy where that can be."""
        array, narrowing = self._array(name)
        return array if narrowing is None else restore(array, narrowing)

    def _array(self, name: str) -> tuple[np.ndarray, Narrowing | None]:
        array = next(leaf.array for leaf in self.item.leaves if leaf.name == name)
        return array, self.narrowings.get(name)

    def read_in(self, original: EncodedItem) -> Callable[[str], np.ndarray]:
        """Return a `read` that gives away the memory of the item that the snapshot was taken of, where that can be.

        Parameters
        ----------
        original : EncodedItem
            Not to be used any more afterwards.
        """
        alone = original.disjoint()
        arrays = {leaf.name: leaf.array for leaf in original.leaves if leaf.name in alone and self._is_exact(leaf.name)}
        return lambda name: arrays[name] if name in arrays else self.read(name)

    def _is_exact(self, name: str) -> bool:
        """Whether every bit will be read back: not so −0.0 and NaN in arrays that may be rounded."""
        how = self.narrowings.get(name)
        return how is None or how.kind in ("identity", "table") or (how.kind == "cast" and how.code_dtype.kind in "iu")
