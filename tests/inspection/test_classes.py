"""What a label consists of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zcache.encoding.geometry import Geometry
from zcache.inspection import classes
from zcache.inspection.classes import LabelClass, label_classes


def of(data, affine=None, axis=None, **kwargs):
    spatial = tuple(i for i in range(data.ndim) if i != axis)

    def read(region):
        return data[tuple(slice(a, b) for a, b in region)]

    return label_classes(read, Geometry(data.shape, spatial, axis, affine), **kwargs)


def test_the_largest_comes_first_and_background_is_none():
    data = np.array([[[0, 1, 1], [7, 7, 7]]], np.uint8)
    affine = np.diag([-10.0, 10, 20, 1])
    assert [(c.value, c.voxels, c.ml) for c in of(data, affine)] == [(7, 3, pytest.approx(6)), (1, 2, pytest.approx(4))]
    assert [one.size_text for one in of(data)] == ["3 voxels", "2 voxels"]
    assert of(data * 0) == []


def test_sizes_are_read_easily():
    assert [LabelClass(1, 1, ml).size_text for ml in (0.00123, 12.345, 1234.5)] == ["0.00123 ml", "12.3 ml", "1,234 ml"]


def test_channels_and_images_of_two_axes():
    data = np.stack([np.zeros((3, 4, 5)), np.ones((3, 4, 5))])
    assert of(data, np.eye(4), 0, channel=1) == [LabelClass(1, 60, pytest.approx(0.06))]
    assert of(data, np.eye(4), 0) == []
    assert of(np.ones((3, 4)), np.eye(3)) == [LabelClass(1, 12, None)]


@pytest.mark.parametrize("affine", [np.zeros((4, 4)), np.full((4, 4), np.nan), np.eye(3)])
def test_affines_that_say_nothing(affine):
    assert of(np.ones((2, 2, 2)), affine)[0].ml is None


@given(arrays(np.float32, (5, 4, 3), elements=st.sampled_from([0, 1, 2, 70_000, -1, np.nan])), st.integers(1, 100))
def test_slab_by_slab_it_is_the_same(data, slab):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(classes, "_SLAB", slab)
        found = {one.value: one.voxels for one in of(data)}
    values, counts = np.unique(data[data > 0], return_counts=True)
    assert found == dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True))
