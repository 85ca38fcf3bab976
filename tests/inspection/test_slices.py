"""Slices at any place: those of the canonical volume, whatever the affine."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest

import zcache
from zcache.encoding.geometry import Geometry
from zcache.inspection.planes import VIEWS, planes
from zcache.inspection.slices import middle, mosaic_view, n_slices, plane_at, spread

SHAPE = (5, 6, 7)
VOLUME = np.random.default_rng(0).integers(0, 1000, (2, *SHAPE)).astype(np.int16)
AFFINES = {
    "RAS": np.eye(4),
    "LPS": np.diag([-1.0, -1, 1, 1]),
    "coronal": np.array([[0, 0, -3.0, 0], [1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]]),
    "sagittal": np.array([[0, 0, 2.0, 5], [-1, 0, 0, 5], [0, -1, 0, 5], [0, 0, 0, 1]]),
}


def read(region):
    return VOLUME[tuple(slice(a, b) for a, b in region)]


def space(affine):
    return Geometry(VOLUME.shape, (1, 2, 3), 0, affine)


@pytest.mark.parametrize("name", AFFINES)
def test_every_slice_is_that_of_the_canonical_volume(name):
    canonical = np.asarray(nib.as_closest_canonical(nib.Nifti1Image(VOLUME[1], AFFINES[name])).dataobj)
    found = space(AFFINES[name])
    for world, view in enumerate(VIEWS):
        n = n_slices(found, view)
        assert n == canonical.shape[world]
        drawn = [plane_at(read, found, view, i, 1) for i in spread(found, view, n)]  # from the low end of the world
        for i, plane in enumerate(drawn):
            assert np.array_equal(plane.image, np.take(canonical, i, axis=world).T[::-1, ::-1])


@pytest.mark.parametrize("name", AFFINES)
def test_the_middle_is_that_of_the_planes(name):
    found = space(AFFINES[name])
    for view, expected in zip(VIEWS, planes(read, found), strict=True):
        plane = plane_at(read, found, view, middle(found, view))
        assert np.array_equal(plane.image, expected.image)
        assert (plane.aspect, plane.spacing, plane.ends) == (expected.aspect, expected.spacing, expected.ends)


def test_no_more_is_read_than_the_slice():
    regions = []
    plane_at(lambda region: regions.append(region) or read(region), space(np.eye(4)), "coronal", 4, 1)
    assert regions == [((1, 2), (0, 5), (4, 5), (0, 7))]


def test_what_is_not_there():
    with pytest.raises(zcache.CacheConfigError, match="slice 7 is not one of the 7 axial slices"):
        plane_at(read, space(None), "axial", 7)
    with pytest.raises(zcache.CacheConfigError, match="channel=2"):
        plane_at(read, space(None), "axial", 0, 2)


def test_an_image_of_two_axes():
    flat = Geometry((6, 7), (0, 1), None, None)
    data = np.arange(42).reshape(6, 7)
    assert (n_slices(flat, "axial"), middle(flat, "axial"), mosaic_view(flat)) == (1, 0, "axial")
    assert np.array_equal(plane_at(lambda _: data, flat, "axial", 0).image, data)


def test_a_mosaic_is_across_thick_slices():
    thick = {view: np.diag([5.0 if axis == i else 1.0 for axis in range(3)] + [1]) for i, view in enumerate(VIEWS)}
    assert {view: mosaic_view(space(affine)) for view, affine in thick.items()} == {view: view for view in VIEWS}
    assert mosaic_view(space(np.diag([1.4, 1, 1, 1]))) == "axial"


def test_slices_that_are_spread():
    assert spread(space(np.eye(4)), "axial", 99) == list(range(7))
    assert spread(space(np.eye(4)), "axial", 3) == [1, 3, 5]
    assert spread(space(np.diag([1.0, 1, -1, 1])), "axial", 3) == [5, 3, 1]
