"""Every affine plots the right way up: nibabel's canonical orientation is the oracle."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcache.encoding.geometry import Geometry
from zcache.encoding.orientation import orientation, to_ras
from zcache.inspection.planes import planes

ROTATION = nib.eulerangles.euler2mat(0.4, -0.3, 0.25)
OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = ROTATION @ np.diag([0.7, 0.9, 5.0])
AFFINES = {
    "RAS": np.eye(4),
    "LPS": np.diag([-1.0, -1, 1, 1]),
    "anisotropic": np.diag([0.5, 0.5, 5, 1]),
    "coronal": np.array([[0, 0, -3.0, 0], [1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]]),
    "oblique": OBLIQUE,
    "oblique LPS": np.diag([-1.0, -1, 1, 1]) @ OBLIQUE,
    "sagittal": np.array([[0, 0, 2.0, 5], [-1, 0, 0, 5], [0, -1, 0, 5], [0, 0, 0, 1]]),
    "sheared": np.array([[-1.5, 0.1, 0, 30], [0, -1.4, 0.3, 20], [0.2, 0, 2.0, -10], [0, 0, 0, 1]]),
}
SHAPE = (5, 6, 7)
VOLUME = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(np.int16)


def read(region):
    return VOLUME[tuple(slice(a, b) for a, b in region)]


@pytest.mark.parametrize("name", AFFINES)
def test_slices_are_those_of_the_canonical_volume(name):
    affine = AFFINES[name]
    canonical = nib.as_closest_canonical(nib.Nifti1Image(VOLUME, affine))
    data, spacing = np.asarray(canonical.dataobj), nib.affines.voxel_sizes(canonical.affine)
    found = planes(read, Geometry(SHAPE, (0, 1, 2), None, affine))
    assert [plane.view for plane in found] == ["sagittal", "coronal", "axial"]
    for world, plane in enumerate(found):
        expected = np.take(data, data.shape[world] // 2, axis=world).T[::-1, ::-1]
        assert np.array_equal(plane.image, expected)
        across, up = (axis for axis in range(3) if axis != world)
        assert plane.aspect == pytest.approx(spacing[up] / spacing[across])
        assert plane.spacing == pytest.approx(spacing[across])
    assert [plane.ends for plane in found] == [("A", "P", "S", "I"), ("R", "L", "S", "I"), ("R", "L", "A", "P")]


@given(st.lists(st.floats(-9, 9, allow_subnormal=False), min_size=9, max_size=9))
def test_orientation_is_nibabels(values):
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(values, (3, 3))
    expected = nib.io_orientation(affine)
    found = orientation(affine)
    assert sorted(found.axes) == [0, 1, 2]
    if not np.isnan(expected).any():
        assert found.axes == tuple(expected[:, 0].astype(int))
        assert found.flips == tuple(expected[:, 1] < 0)
        assert found.codes == "".join(nib.aff2axcodes(affine))
        assert found.spacing == pytest.approx(tuple(nib.affines.voxel_sizes(affine)))


@pytest.mark.parametrize(
    "affine",
    [
        np.zeros((4, 4)),
        np.diag([2.0, 0, 3, 1]),
        np.full((4, 4), np.nan),
        np.full((4, 4), np.inf),
        np.full((4, 4), 1e300),
        np.full((4, 4), 5e-324),
        np.ones((4, 4)),
        np.eye(1),
        np.zeros((0, 0)),
        np.ones((3, 4)),
    ],
)
@pytest.mark.parametrize("n_axes", [2, 3])
def test_affines_that_are_none(affine, n_axes):
    found = orientation(affine, n_axes)
    assert len(set(found.axes)) == n_axes
    assert all(np.isfinite(s) and s > 0 for s in found.spacing)
    if n_axes == 3:
        shown = planes(read, Geometry(SHAPE, (0, 1, 2), None, affine))
        assert sorted(plane.image.size for plane in shown) == [30, 35, 42]


def test_what_a_singular_affine_says_is_used():
    found = orientation(np.diag([-2.0, 0, -3, 1]))
    assert (found.axes, found.flips, found.spacing) == ((0, 1, 2), (True, False, True), (2.0, 1.0, 3.0))


def test_a_slice_of_two_axes():
    found = orientation([[0, -2.0, 0], [3, 0, 0], [0, 0, 1]], 2)
    assert (found.axes, found.flips, found.spacing, found.codes) == ((1, 0), (False, True), (3.0, 2.0), "AL")


def test_lps():
    assert np.array_equal(to_ras(OBLIQUE, "LPS"), np.diag([-1.0, -1, 1, 1]) @ OBLIQUE)
    assert np.array_equal(to_ras(OBLIQUE, "RAS"), OBLIQUE)
