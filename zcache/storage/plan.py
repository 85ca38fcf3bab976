"""What a read of an array does, worked out before anything is read: slabs of the output, chunks, byte ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zcache.encoding.chunking import ChunkGrid, ChunkRead, Region, combine

__all__ = ["Place", "RangeRead", "Slab", "coalesce", "plan_slabs"]

_MAX_GAP_BYTES = 32 * 1024  # reading over a gap this long is cheaper than another system call
_MAX_RANGE_BYTES = 1024 * 1024  # what is read is decoded while it is still in the processor's cache


class Place(NamedTuple):
    """A chunk's part in a read, and where its bytes lie in the shard."""

    read: ChunkRead
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One positional read that serves several chunks.

    Attributes
    ----------
    start, stop : int
        Half-open byte range in the shard.
    places : tuple of Place
        What to decode from it.
    """

    start: int
    stop: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of the output that is decoded into one buffer and restored from there in one go.

    Attributes
    ----------
    out_part : tuple of slice
        The slab: leading axes of the output, all of the axes that follow.
    reads : tuple of ChunkRead
        The chunks that make it up, in index order; their `out_part` is relative to the slab.
    """

    out_part: tuple[slice, ...]
    reads: tuple[ChunkRead, ...]


def plan_slabs(grid: ChunkGrid, region: Region, max_elements: int) -> list[Slab]:
    """Divide the read of a region.

    Parameters
    ----------
    grid : ChunkGrid
        The array's chunks.
    region : Region
        Half-open (start, stop) per axis, inside the array.
    max_elements : int
        Slabs hold no more, unless a row of chunks along the last axis does.

    Returns
    -------
    list of Slab
        Disjoint, in index order, covering the region; none for an empty one.

    Examples
    --------
    >>> grid = ChunkGrid((4, 6, 6), (2, 3, 3))
    >>> [slab.out_part for slab in plan_slabs(grid, ((1, 4), (0, 6), (0, 6)), max_elements=80)]
    [(slice(0, 1, None),), (slice(1, 3, None),)]
    """
    axes, strides = grid.overlaps(region), grid.strides
    if not all(axes):
        return []
    extents = [stop - start for start, stop in region]
    depth = 0
    while depth < len(extents) - 1 and math.prod(extents) > max_elements:
        extents[depth] = min(extents[depth], grid.chunk_shape[depth])
        depth += 1
    tails = list(combine(axes[depth:], strides[depth:]))
    slabs = []
    for first, chunk_lead, out_lead in combine(axes[:depth], strides[:depth]):
        all_of_it = tuple(slice(0, part.stop - part.start) for part in out_lead)
        reads = [ChunkRead(first + index, chunk_lead + chunk, all_of_it + out) for index, chunk, out in tails]
        slabs.append(Slab(out_lead, tuple(reads)))
    return slabs


def coalesce(places: Sequence[Place]) -> Iterator[RangeRead]:
    """Group chunks that lie close together in the shard into common reads.

    Parameters
    ----------
    places : sequence of Place
        In any order.
    """
    group: list[Place] = []
    start = stop = 0
    for place in sorted(places, key=lambda p: p.offset):
        end = max(stop, place.offset + place.nbytes)
        if group and (place.offset - stop > _MAX_GAP_BYTES or end - start > _MAX_RANGE_BYTES):
            yield RangeRead(start, stop, tuple(group))
            group = []
        if not group:
            start, end = place.offset, place.offset + place.nbytes
        group.append(place)
        stop = end
    if group:
        yield RangeRead(start, stop, tuple(group))
