"""Rank and select on bits against listing the members."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zcache.encoding import voxels
from zcache.encoding.voxels import BLOCK_NBYTES, PackedSets, VoxelSet
from zcache.errors import EntryDamagedError, UnstorableError

BLOCK = 8 * BLOCK_NBYTES


def ranges_of(masks, length):
    for start in range(0, masks.shape[1], length):
        yield start, [np.flatnonzero(mask[start : start + length]) for mask in masks]


def opened(packed, n_voxels, row=0):
    return VoxelSet(n_voxels, packed.ends[row], lambda i: packed.bits[row, i * BLOCK_NBYTES : (i + 1) * BLOCK_NBYTES])


@settings(deadline=None)
@given(
    masks=hnp.arrays(np.bool_, st.tuples(st.integers(1, 3), st.integers(1, 400))),
    length=st.sampled_from([8, 64, 400]),
)
def test_every_member_is_found_in_order(masks, length):
    n_voxels = masks.shape[1]
    packed = PackedSets.pack(n_voxels, ranges_of(masks, length))
    for row, mask in enumerate(masks):
        found = opened(packed, n_voxels, row)
        members = np.flatnonzero(mask).tolist()
        assert len(found) == len(members)
        assert [found[i] for i in range(len(members))] == members
        assert [found[-1 - i] for i in range(len(members))] == members[::-1]


@settings(deadline=None, max_examples=25)
@given(
    n_voxels=st.integers(BLOCK - 9, 4 * BLOCK + 9),
    density=st.sampled_from([0.0, 1e-5, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_members_beyond_the_first_block(n_voxels, density, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random(n_voxels) < density
    packed = PackedSets.pack(n_voxels, ranges_of(mask[None], BLOCK // 2))
    found, members = opened(packed, n_voxels), np.flatnonzero(mask)
    assert len(found) == len(members)
    edges = np.searchsorted(members, np.arange(0, n_voxels, BLOCK))
    places = {*rng.integers(0, max(len(members), 1), 20), *edges, *(edges - 1), 0, len(members) - 1}
    for place in places:
        if 0 <= place < len(members):
            assert found[place] == members[place]


@pytest.mark.parametrize("place", [3, -4])
def test_a_place_that_is_not_there(place):
    found = opened(PackedSets.pack(20, [(0, [np.array([1, 2, 5])])]), 20)
    with pytest.raises(IndexError, match="one of 3 voxels"):
        found[place]


def test_no_members_and_no_sets():
    packed = PackedSets.pack(20, [(0, [np.array([], np.int64)])])
    assert len(opened(packed, 20)) == 0
    assert PackedSets.pack(20, []).bits.shape == (0, BLOCK_NBYTES)


def test_bits_that_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(voxels, "_MAX_PACKED_BYTES", BLOCK_NBYTES)
    with pytest.raises(UnstorableError, match="2 sets of 20 voxels"):
        PackedSets.pack(20, [(0, [np.array([1]), np.array([2])])])


@pytest.mark.parametrize(
    ("ends", "match"),
    [([], "counts"), ([30], "counts"), ([9, 3], "counts"), ([2], "as many"), ([0, 2], "as many")],
)
def test_counts_that_cannot_be_right(ends, match):
    packed = PackedSets.pack(20, [(0, [np.array([1, 2, 5])])])
    with pytest.raises(EntryDamagedError, match=match):
        VoxelSet(20, np.array(ends, np.uint64), lambda _: packed.bits[0])[0]


def test_a_bit_beyond_the_volume():
    packed = PackedSets.pack(24, [(0, [np.array([22])])])
    with pytest.raises(EntryDamagedError, match="beyond"):
        opened(packed, 20)[0]
