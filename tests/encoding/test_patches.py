"""Chunks for patches: as cheap as any that an exhaustive count over all places of the patch finds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcache.encoding import patches
from zcache.encoding.chunking import ChunkGrid, choose_chunk_shape
from zcache.encoding.patches import chunk_shape_for_patches


def mean_seconds(shape, chunk_shape, patch, itemsize):
    """Count the chunks that a patch overlaps at every place it can have."""
    counts = [
        np.mean([(start + r - 1) // c - start // c + 1 for start in range(n - r + 1)])
        for n, c, r in zip(shape, chunk_shape, patch, strict=True)
    ]
    chunk_s = patches._CHUNK_S + math.prod(chunk_shape) * itemsize / patches._DECODED_BYTES_PER_S
    return math.prod(counts) * chunk_s


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(40, 200), st.integers(40, 200), st.integers(40, 200)),
    parts=st.tuples(*[st.sampled_from([0.02, 0.1, 0.3, 0.6, 1.0])] * 3),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_no_even_division_is_much_cheaper(shape, parts, itemsize):
    patch = tuple(max(1, int(n * part)) for n, part in zip(shape, parts, strict=True))
    chosen = chunk_shape_for_patches(shape, itemsize, patch)
    if math.prod(patch) * 2 > math.prod(shape) or math.prod(shape) * itemsize <= 65536:
        assert chosen is None
        return
    if chosen is None:
        return
    assert 65536 <= math.prod(chosen) * itemsize <= 524288
    others = itertools.product(*([math.ceil(n / k) for k in range(1, 10)] for n in shape))
    fit = [c for c in others if 65536 <= math.prod(c) * itemsize <= 524288]
    best = min(mean_seconds(shape, c, patch, itemsize) for c in fit)
    assert mean_seconds(shape, chosen, patch, itemsize) <= 1.2 * best


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ((96, 96, 96), (1, 48, 51, 55)),
        ((1, -1, -1), (1, 1, 252, 328)),
        ((0, 0, 2), (1, 240, 252, 2)),
        ((), (1, 60, 63, 66)),
        ((240, 252, 320), (1, 60, 63, 66)),
        ((5, 9, 96, 96, 96), (1, 48, 51, 55)),
    ],
)
def test_the_patch_guides_the_chunks_of_a_volume(patch, expected):
    assert choose_chunk_shape((1, 240, 252, 328), 1, patch=patch) == expected


def test_given_chunks_are_not_changed():
    assert choose_chunk_shape((1, 240, 252, 328), 1, (64, 64, 64), patch=(96, 96, 96)) == (1, 64, 64, 64)


def test_patches_of_a_size_read_fewer_voxels_than_with_the_usual_chunks():
    shape, patch = (240, 252, 328), (4, 200, 200)
    usual, guided = (choose_chunk_shape(shape, 2, patch=p) for p in ((), patch))

    def read(chunk_shape):
        grid = ChunkGrid(shape, chunk_shape)
        rng = np.random.default_rng(0)
        starts = [rng.integers(0, [n - r + 1 for n, r in zip(shape, patch, strict=True)]) for _ in range(30)]
        regions = [tuple((int(a), int(a) + r) for a, r in zip(start, patch, strict=True)) for start in starts]
        return sum(len(grid.reads(region)) for region in regions) * math.prod(chunk_shape)

    assert read(guided) < read(usual) / 4
