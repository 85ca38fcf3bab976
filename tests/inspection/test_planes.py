"""Which axes are space: volumes, images, channels, time."""

from __future__ import annotations

import numpy as np
import pytest

import zcache
from zcache.encoding.geometry import choose_image, choose_label, geometry
from zcache.encoding.places import ArrayPlace
from zcache.inspection.planes import planes, window


def place(shape, kind="ndarray", name="image", dtype="float32", **node):
    return ArrayPlace(name, kind, shape, dtype, name, node)


@pytest.mark.parametrize(
    ("shape", "affine", "spatial", "channel"),
    [
        ((40, 50), None, (0, 1), None),
        ((3, 40, 50), None, (1, 2), 0),
        ((30, 40, 50), None, (0, 1, 2), None),
        ((1, 30, 40, 50), None, (1, 2, 3), 0),
        ((4, 30, 40, 50), 4, (1, 2, 3), 0),
        ((30, 40, 50), 4, (0, 1, 2), None),
        ((1, 40, 50), 3, (1, 2), 0),
        ((7, 40, 50), 3, (1, 2), 0),
        ((2, 1, 30, 40, 50), 4, (2, 3, 4), 1),
        ((9,), None, None, None),
        ((0, 4, 5), None, None, None),
    ],
)
def test_axes(shape, affine, spatial, channel):
    found = geometry(place(shape), {} if affine is None else {"affine": np.eye(affine)})
    if spatial is None:
        assert found is None
    else:
        assert (found.spatial, found.channel) == (spatial, channel)


def test_what_monai_says_of_the_axes_counts():
    assert geometry(place((3, 40, 50), "metatensor", spatial_ndim=2), {"affine": np.eye(4)}).spatial == (1, 2)
    assert geometry(place((20, 40, 50), "metatensor", spatial_ndim=2), {"affine": np.eye(3)}).spatial == (1, 2)


def test_time_that_is_still_last():
    meta = {"affine": np.eye(4), "original_channel_dim": -1, "spatial_shape": np.array([30, 40, 50])}
    found = geometry(place((30, 40, 50, 8)), meta)
    assert (found.spatial, found.channel, found.n_channels) == ((0, 1, 2), 3, 8)
    moved = geometry(place((8, 30, 40, 50)), meta)
    assert (moved.spatial, moved.channel) == ((1, 2, 3), 0)


def test_channels_and_time():
    data = np.random.default_rng(0).random((4, 6, 7, 8), np.float32)
    space = geometry(place(data.shape))
    for channel in range(4):
        axial = planes(lambda r: data[tuple(slice(a, b) for a, b in r)], space, channel)[2]
        assert np.array_equal(axial.image, data[channel, ::-1, ::-1, 4].T)
        assert axial.ends == ("", "", "", "")  # nobody says where right is
    with pytest.raises(zcache.CacheConfigError, match="channel=4 is not one of the 4 channels"):
        planes(lambda r: data, space, 4)


def test_photographs():
    def read(region):
        return data[tuple(slice(a, b) for a, b in region)]

    data = np.random.default_rng(0).integers(0, 255, (3, 40, 50)).astype(np.uint8)
    [image] = planes(read, geometry(place(data.shape, dtype="uint8")))
    assert np.array_equal(image.image, np.moveaxis(data, 0, -1))
    # MONAI's reader has columns first, and an affine of 1.
    [image] = planes(read, geometry(place(data.shape, "metatensor", spatial_ndim=2), {"affine": np.eye(3)}))
    assert np.array_equal(image.image, np.moveaxis(data, 0, -1).transpose(1, 0, 2))
    data = np.random.default_rng(0).normal(size=(3, 40, 50))
    assert planes(read, geometry(place(data.shape)))[0].image.shape == (40, 50)


def test_a_slice_of_a_patient():
    data = np.arange(20.0).reshape(1, 4, 5)
    meta = {"affine": np.diag([-2.0, -3, 1])}
    [image] = planes(lambda _: data, geometry(place(data.shape, "metatensor", spatial_ndim=2), meta))
    assert np.array_equal(image.image, data[0].T)  # runs to the left and to posterior, which is how it is drawn
    assert (image.aspect, image.spacing, image.ends) == (1.5, 2.0, ("R", "L", "A", "P"))


def test_a_volume_in_lps():
    data = np.random.default_rng(0).random((5, 6, 7))
    meta = {"affine": np.eye(4), "space": "LPS"}
    axial = planes(lambda r: data[tuple(slice(a, b) for a, b in r)], geometry(place(data.shape), meta))[2]
    assert np.array_equal(axial.image, data[:, :, 3].T)


def test_window():
    assert window([np.array([np.nan, np.inf])]) == (0.0, 1.0)
    assert window([np.array([3, 3])]) == (3.0, 4.0)
    assert window([np.arange(101)]) == (1.0, 99.0)
    assert window([]) == (0.0, 1.0)


def test_what_is_shown():
    found = [(p, geometry(p)) for p in (place((9, 9)), place((1, 20, 20, 20), name="label"), place((1, 20, 20, 20)))]
    image = choose_image(found)
    assert image is found[2]
    assert choose_label(found, image) is found[1]
    assert choose_image(found[1:2]) is found[1]
    assert choose_label(found[:1], found[0]) is None
    assert choose_image([]) is None
