"""Which chunks an array has, and which of them a region touches: plain arithmetic on shapes.

Axis order is the array's own: channels first, then space, as MONAI has it. Regions are half-open
``(start, stop)`` pairs, one per axis, in elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from zcache.encoding.patches import chunk_shape_for_patches
from zcache.errors import CacheConfigError

__all__ = [
    "MAX_CHUNKS",
    "MAX_CHUNK_BYTES",
    "ChunkGrid",
    "ChunkRead",
    "ChunkSpec",
    "Overlap",
    "Region",
    "check_region",
    "choose_chunk_shape",
    "combine",
    "parse_chunks",
    "whole_region",
]

Region: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ``(start, stop)`` per axis."""

ChunkSpec: TypeAlias = Literal["auto"] | tuple[int, ...]
"""``"auto"``, or the chunk's extent along the trailing axes of an array."""

Overlap: TypeAlias = tuple[int, slice, slice]
"""Of a region with a chunk, along one axis: the chunk's number, the part of the chunk, the part of the region."""

TARGET_BYTES = 256 * 1024
"""Bytes of a chunk aimed at: decoded, it fits an L2 cache; encoded, it is one disk read ahead."""

MAX_CHUNK_BYTES = 512 * 1024 * 1024
"""No chunk is larger: far below Blosc's limit of 2 GiB per buffer."""

MAX_CHUNKS = 1 << 20
"""No entry has more: planning the read of a chunk takes about a kilobyte and a few microseconds."""

_SPATIAL_AXES = 3
_MAX_EXTRA_PADDING = 0.03
_BIT_GROUP = 8  # blosc shuffles bits of eight elements at a time, and leaves a chunk of another number as it is


class ChunkRead(NamedTuple):
    """One chunk's part in a read.

    Attributes
    ----------
    chunk : int
        Position of the chunk in the shard's index (C order).
    chunk_part, out_part : tuple of slice
        The voxels to take from the chunk, and where they belong in the output.
    """

    chunk: int
    chunk_part: tuple[slice, ...]
    out_part: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular grid of chunks over an array; chunks at the far edges are padded to full size.

    Examples
    --------
    >>> grid = ChunkGrid(shape=(1, 100, 90), chunk_shape=(1, 50, 45))
    >>> grid.counts, grid.n_chunks, grid.shard_shape
    ((1, 2, 2), 4, (1, 100, 90))
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def n_chunks(self) -> int:
        """Number of chunks of the whole array."""
        return math.prod(self.counts)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Extent of the one shard that holds the whole array: a multiple of the chunk shape."""
        return tuple(n * c for n, c in zip(self.counts, self.chunk_shape, strict=True))

    def parts(self) -> Iterator[tuple[slice, ...]]:
        """Yield each chunk's place in the array, clipped to the array, in index order."""
        axes = (
            [slice(i * c, min((i + 1) * c, n)) for i in range(count)]
            for n, c, count in zip(self.shape, self.chunk_shape, self.counts, strict=True)
        )
        return itertools.product(*axes)

    def reads(self, region: Region) -> list[ChunkRead]:
        """Plan the read of a region: every chunk that overlaps it, in index order."""
        return list(combine(self.overlaps(region), self.strides))

    @property
    def strides(self) -> list[int]:
        """How far apart in the shard's index neighbours along each axis are."""
        counts = self.counts
        return [math.prod(counts[i + 1 :]) for i in range(len(counts))]

    def overlaps(self, region: Region) -> list[list[Overlap]]:
        """Return, for each axis, the overlaps of a region with the chunks along it."""
        return [_overlaps(start, stop, n) for (start, stop), n in zip(region, self.chunk_shape, strict=True)]


def combine(axes: Sequence[Sequence[Overlap]], strides: Sequence[int]) -> Iterator[ChunkRead]:
    """Yield every combination of overlaps along several axes, in index order.

    Parameters
    ----------
    axes, strides : sequence
        Of `ChunkGrid.overlaps` and `ChunkGrid.strides`: of all axes, or of those on one side of an axis.
    """
    for cells in itertools.product(*axes):
        chunk = sum(cell[0] * stride for cell, stride in zip(cells, strides, strict=True))
        yield ChunkRead(chunk, tuple(cell[1] for cell in cells), tuple(cell[2] for cell in cells))


def _overlaps(start: int, stop: int, n_chunk: int) -> list[Overlap]:
    cells = []
    for i in range(start // n_chunk, -(-stop // n_chunk) if start < stop else 0):
        first = i * n_chunk
        low, high = max(start, first), min(stop, first + n_chunk)
        cells.append((i, slice(low - first, high - first), slice(low - start, high - start)))
    return cells


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region that covers an array of the given shape."""
    return tuple((0, n) for n in shape)


def check_region(name: str, region: Region | None, shape: tuple[int, ...]) -> None:
    """Raise IndexError unless `region` is None or lies inside an array of the given shape."""
    if region is not None and not (
        len(region) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(region, shape, strict=True))
    ):
        raise IndexError(f"the region {region} does not lie inside {name!r} of shape {shape}")


def parse_chunks(chunks: object) -> ChunkSpec:
    """Check a ``chunks=`` argument.

    Raises
    ------
    CacheConfigError
        Neither ``"auto"`` nor a sequence of positive integers.
    """
    if chunks == "auto":
        return "auto"
    if isinstance(chunks, Sequence) and not isinstance(chunks, str) and chunks:
        sizes = tuple(chunks)
        if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
            return sizes
    raise CacheConfigError(
        f"chunks={chunks!r} is neither 'auto' nor a sequence of positive integers such as (96, 96, 96), "
        "which are the chunk's extents along the last axes of each array"
    )


def choose_chunk_shape(
    shape: Sequence[int],
    itemsize: int,
    spec: ChunkSpec = "auto",
    target_bytes: int = TARGET_BYTES,
    patch: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Choose the chunk shape of an array.

    With ``"auto"``, chunks hold about `target_bytes`, are near-isotropic over the last three axes and keep the axes
    before these (channels, time) apart; small arrays take several channels together. Each axis is divided evenly, so
    that chunks at the edges are not slivers.

    Parameters
    ----------
    shape : sequence of int
        Shape of the array, every extent at least 1.
    itemsize : int
        Bytes per stored element.
    spec : "auto" or tuple of int
        A tuple gives the extents along the trailing axes; leading axes get 1, and extents are cut to the array's.
    target_bytes : int
        Bytes of a chunk, with ``"auto"``.
    patch : tuple of int
        With ``"auto"``: extents along the trailing axes of the patches that will mostly be read, if that is known
        (see `zcache.encoding.patches`).

    Raises
    ------
    CacheConfigError
        The chunk of `spec` would be larger than 512 MiB, or too small for an array of this size.

    Examples
    --------
    >>> choose_chunk_shape((1, 240, 252, 328), itemsize=1)
    (1, 60, 63, 66)
    >>> choose_chunk_shape((1, 240, 252, 328), itemsize=2, spec=(96, 96, 96))
    (1, 96, 96, 96)
    """
    if spec != "auto":
        tail = spec[-len(shape) :]
        full = (1,) * (len(shape) - len(tail)) + tail
        chosen = tuple(min(c, n) for c, n in zip(full, shape, strict=True))
        if math.prod(chosen) * itemsize > MAX_CHUNK_BYTES:
            raise CacheConfigError(
                f"chunks={spec} makes chunks of {math.prod(chosen) * itemsize} bytes; 512 MiB at most"
            )
        n_chunks = ChunkGrid(tuple(shape), chosen).n_chunks
        if n_chunks > MAX_CHUNKS:
            raise CacheConfigError(
                f"chunks={spec} makes {n_chunks} chunks of an array {tuple(shape)}; {MAX_CHUNKS} at most"
            )
        return chosen
    n_axes = min(len(patch), len(shape))
    for_patches = chunk_shape_for_patches(shape[-n_axes:], itemsize, patch[-n_axes:]) if n_axes else None
    if for_patches is not None:
        return _in_bit_groups(tuple(shape), (1,) * (len(shape) - n_axes) + for_patches)
    chosen_sizes = [1] * len(shape)
    budget = max(1, target_bytes // itemsize)
    spatial = list(range(max(0, len(shape) - _SPATIAL_AXES), len(shape)))
    leading = list(range(spatial[0] - 1, -1, -1)) if spatial else []
    # Smallest axes first: what a short axis leaves of the budget goes to the longer ones.
    for left, axis in zip(range(len(spatial), 0, -1), sorted(spatial, key=lambda a: shape[a]), strict=True):
        side = max(1, round((budget / math.prod(chosen_sizes)) ** (1 / left)))
        chosen_sizes[axis] = _even_part(shape[axis], side)
    for axis in leading:
        chosen_sizes[axis] = _even_part(shape[axis], max(1, budget // math.prod(chosen_sizes)))
    return _in_bit_groups(tuple(shape), tuple(chosen_sizes))


def _even_part(extent: int, side: int) -> int:
    """Return the extent of the fewest even parts that are about `side` long, a tenth more at most."""
    longest = side * 11 // 10  # a whole number, or rounding up would make two of a side of 1: two channels in a chunk
    return math.ceil(extent / math.ceil(extent / longest))


def _in_bit_groups(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Round the extent in space up that makes the number of elements a multiple of 8 with the least padding."""

    def rounded(axis: int) -> tuple[int, ...]:
        others = math.prod(chunk_shape[:axis] + chunk_shape[axis + 1 :])
        multiple = _BIT_GROUP // math.gcd(_BIT_GROUP, others)
        extent = -(-chunk_shape[axis] // multiple) * multiple
        return (*chunk_shape[:axis], extent, *chunk_shape[axis + 1 :])

    def padding(chunks: tuple[int, ...]) -> float:
        return math.prod(ChunkGrid(shape, chunks).shard_shape) / math.prod(shape)

    spatial = range(max(0, len(shape) - _SPATIAL_AXES), len(shape))
    best = min((rounded(axis) for axis in spatial), key=padding)
    return best if padding(best) <= padding(chunk_shape) + _MAX_EXTRA_PADDING else chunk_shape
