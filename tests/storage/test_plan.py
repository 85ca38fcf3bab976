"""Plans of reads: every voxel once, whatever the slabs; few byte ranges, each bounded."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zcache.encoding.chunking import ChunkGrid, ChunkRead
from zcache.storage.plan import Place, coalesce, plan_slabs


@st.composite
def regions(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((a, b) for a, b in ends)


@given(st.data())
def test_slabs_make_up_the_region_from_the_chunks_of_the_obvious_plan(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    grid = ChunkGrid(shape, tuple(data.draw(st.integers(1, 9)) for _ in shape))
    region = data.draw(regions(shape))
    limit = data.draw(st.integers(1, 200))
    chunk_of = np.zeros(shape, int)
    inside = np.zeros(shape, int)
    for i, part in enumerate(grid.parts()):
        chunk_of[part] = i
        inside[part] = np.arange(math.prod(grid.chunk_shape)).reshape(grid.chunk_shape)[
            tuple(slice(p.stop - p.start) for p in part)
        ]
    box = tuple(slice(*r) for r in region)
    out = np.full([b - a for a, b in region], -1)
    places = out.copy()
    slabs = plan_slabs(grid, region, limit)
    for slab in slabs:
        target = out[slab.out_part]
        row = math.prod(target.shape[len(shape) - 1 :])
        assert target.size <= limit or len({r.out_part[-1].start for r in slab.reads}) == len(slab.reads) or row > limit
        for read in slab.reads:
            assert (target[read.out_part] == -1).all()
            target[read.out_part] = read.chunk
            numbers = np.arange(math.prod(grid.chunk_shape)).reshape(grid.chunk_shape)
            places[slab.out_part][read.out_part] = numbers[read.chunk_part]
    assert (out == chunk_of[box]).all()
    assert (places == inside[box]).all()
    assert [r.chunk for slab in plan_slabs(grid, region, 10**9) for r in slab.reads] == [
        r.chunk for r in grid.reads(region)
    ]


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(20, 10**6)), max_size=30))
def test_coalesced_reads_serve_every_place_once_and_are_bounded(spans):
    places = [Place(ChunkRead(i, (), ()), offset, nbytes) for i, (offset, nbytes) in enumerate(spans)]
    found = list(coalesce(list(places)))
    served = [place for r in found for place in r.places]
    assert sorted(served, key=lambda p: p.read.chunk) == places
    for r in found:
        assert r.start == min(offset for _, offset, _ in r.places)
        assert r.stop == max(offset + nbytes for _, offset, nbytes in r.places)
        assert r.stop - r.start <= max(2**20, *(nbytes for _, _, nbytes in r.places))
        edges = sorted((offset, offset + nbytes) for _, offset, nbytes in r.places)
        reach = edges[0][1]
        for start, stop in edges[1:]:
            assert start - reach <= 32 * 1024
            reach = max(reach, stop)
    assert [r.start for r in found] == sorted(r.start for r in found)


def test_neighbours_share_a_read_and_distant_chunks_do_not():
    def ranges(*spans):
        return [(r.start, r.stop) for r in coalesce([Place(ChunkRead(i, (), ()), *s) for i, s in enumerate(spans)])]

    assert ranges((0, 100), (100, 50), (150, 1)) == [(0, 151)]
    assert ranges((0, 100), (100 + 32 * 1024, 50)) == [(0, 32 * 1024 + 150)]
    assert ranges((0, 100), (101 + 32 * 1024, 50)) == [(0, 100), (101 + 32 * 1024, 151 + 32 * 1024)]
    assert ranges((500, 20), (0, 20)) == [(0, 520)]
    assert ranges(*((i * 2**18, 2**18) for i in range(9))) == [(0, 2**20), (2**20, 2**21), (2**21, 9 * 2**18)]
    assert ranges() == []
