"""Chunk grids: every voxel in exactly one chunk, every read exactly what was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcache.encoding.chunking import ChunkGrid, choose_chunk_shape, parse_chunks, whole_region
from zcache.errors import CacheConfigError

KIB = 1024


@st.composite
def grids(draw) -> ChunkGrid:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return ChunkGrid(tuple(shape), tuple(draw(st.integers(1, 11)) for _ in shape))


@st.composite
def regions(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((a, b) for a, b in ends)


@given(grids())
def test_parts_tile_the_array_exactly_and_in_index_order(grid):
    covered = np.zeros(grid.shape, int)
    parts = list(grid.parts())
    for part in parts:
        covered[part] += 1
        assert all(0 < p.stop - p.start <= c for p, c in zip(part, grid.chunk_shape, strict=True))
    assert (covered == 1).all()
    assert len(parts) == grid.n_chunks == math.prod(grid.counts)
    cells = [tuple(p.start // c for p, c in zip(part, grid.chunk_shape, strict=True)) for part in parts]
    assert cells == list(np.ndindex(grid.counts))


@given(st.data())
def test_reads_cover_a_region_exactly_once(data):
    grid = data.draw(grids())
    region = data.draw(regions(grid.shape))
    array = np.arange(1, math.prod(grid.shape) + 1).reshape(grid.shape)
    padded = np.zeros(grid.shard_shape, int)
    padded[tuple(slice(n) for n in grid.shape)] = array
    chunks = [
        padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, grid.chunk_shape, strict=True))]
        for cell in np.ndindex(grid.counts)
    ]
    out = np.zeros([b - a for a, b in region], int)
    times = np.zeros(out.shape, int)
    reads = grid.reads(region)
    for read in reads:
        out[read.out_part] = chunks[read.chunk][read.chunk_part]
        times[read.out_part] += 1
    assert (times == 1).all()
    np.testing.assert_array_equal(out, array[tuple(slice(a, b) for a, b in region)])
    indices = [read.chunk for read in reads]
    assert indices == sorted(set(indices))
    touched = [-(-b // c) - a // c for (a, b), c in zip(region, grid.chunk_shape, strict=True)]
    assert len(reads) == (math.prod(touched) if out.size else 0)


def test_the_shard_is_the_array_rounded_up_to_chunks():
    grid = ChunkGrid((3, 10, 7), (2, 5, 4))
    assert (grid.counts, grid.n_chunks, grid.shard_shape) == ((2, 2, 2), 8, (4, 10, 8))
    assert whole_region([3, 10]) == ((0, 3), (0, 10))


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((7,), 8, (7,)),
        ((1, 1, 11, 9), 2, (1, 1, 11, 9)),
        ((32, 1, 64, 64), 1, (32, 1, 64, 64)),
        ((1, 20000, 3), 4, (1, 20000, 3)),
        ((2, 3, 4, 5, 6), 4, (2, 3, 4, 5, 6)),
    ],
)
def test_small_arrays_are_one_chunk(shape, itemsize, expected):
    assert choose_chunk_shape(shape, itemsize) == expected


LARGE = [
    ((1, 240, 252, 328), 1),
    ((1, 512, 512, 130), 4),
    ((2, 512, 512, 97), 2),
    ((14, 200, 210, 220), 1),
    ((32, 200, 200, 200), 1),
    ((3, 40, 100, 110, 90), 2),
    ((1, 20000, 20000), 1),
    ((300, 300, 300, 3), 4),
    ((1, 500, 500, 40, 60), 8),
    ((10**7,), 2),
    ((1, 2, 2, 10**7), 1),
    ((1, 1300, 1300, 1300), 16),
]


@pytest.mark.parametrize(("shape", "itemsize"), LARGE)
def test_chunks_of_large_arrays_hold_64_to_512_kib(shape, itemsize):
    chosen = choose_chunk_shape(shape, itemsize)
    assert 64 * KIB <= math.prod(chosen) * itemsize <= 512 * KIB, chosen
    assert all(c >= 1 for c in chosen)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8, 16]))
def test_no_chunk_is_above_512_kib_and_padding_is_small(shape, itemsize):
    chosen = choose_chunk_shape(shape, itemsize)
    assert math.prod(chosen) * itemsize <= 512 * KIB
    if math.prod(shape) * itemsize >= 1024 * KIB:
        assert math.prod(chosen) * itemsize >= 64 * KIB
    for n, c in zip(shape, chosen, strict=True):
        assert c <= n + 7
        assert -(-n // c) * c - n < c  # no chunk is padding alone


@pytest.mark.parametrize(
    ("shape", "itemsize"), [((1, 240, 252, 328), 1), ((1, 512, 512, 130), 4), ((2, 97, 512, 512), 2)]
)
def test_chunks_are_near_isotropic_in_space(shape, itemsize):
    spatial = choose_chunk_shape(shape, itemsize)[-3:]
    assert max(spatial) <= 1.5 * min(spatial), spatial


@pytest.mark.parametrize("shape", [(2, 128, 128, 128), (14, 200, 210, 220), (32, 200, 200, 200), (3, 40, 100, 110, 90)])
def test_channels_of_large_volumes_are_apart(shape):
    chosen = choose_chunk_shape(shape, 1)
    assert set(chosen[:-3]) == {1}, chosen


@given(st.lists(st.integers(1, 15), min_size=1, max_size=5), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_given_chunks_are_those_of_the_last_axes(shape, spec):
    chosen = choose_chunk_shape(shape, 1, tuple(spec))
    tail = spec[-len(shape) :]
    lead = len(shape) - len(tail)
    assert chosen[:lead] == (1,) * lead
    assert chosen[lead:] == tuple(min(c, n) for c, n in zip(tail, shape[lead:], strict=True))


def test_case_13_given_chunks_stay_far_below_the_codec_limit():
    assert choose_chunk_shape((1, 512, 1024, 1024), 1, (512, 1024, 1024)) == (1, 512, 1024, 1024)
    with pytest.raises(CacheConfigError, match="512 MiB at most"):
        choose_chunk_shape((1, 513, 1024, 1024), 1, (513, 1024, 1024))


def test_given_chunks_are_not_so_small_that_no_reader_could_plan_a_read():
    assert choose_chunk_shape((1024, 1024), 1, (1, 1)) == (1, 1)
    with pytest.raises(CacheConfigError, match=r"makes 1049600 chunks of an array .1025, 1024.; 1048576 at most"):
        choose_chunk_shape((1025, 1024), 1, (1, 1))


@pytest.mark.parametrize(("chunks", "parsed"), [("auto", "auto"), ((96, 96, 96), (96, 96, 96)), ([8], (8,))])
def test_chunks_argument(chunks, parsed):
    assert parse_chunks(chunks) == parsed


@pytest.mark.parametrize("chunks", ["96", "", (), 96, None, (0, 1), (-1,), (1.5,), (True,), ("8",), {"a": 1}])
def test_chunks_argument_that_cannot_work(chunks):
    with pytest.raises(CacheConfigError) as e:
        parse_chunks(chunks)
    assert repr(chunks) in str(e.value)
    assert "(96, 96, 96)" in str(e.value)
