"""Colours of classes, and what lies over a slice."""

from __future__ import annotations

import numpy as np
import pytest

from zcache.inspection.palette import COLOURS, blended, class_colours, codes, overlay


def test_classes_have_one_colour_each_then_they_begin_anew():
    assert len({tuple(colour) for colour in COLOURS.tolist()}) == len(COLOURS) == 18
    assert np.array_equal(class_colours(np.array([1, 18, 19])), COLOURS[[0, 17, 0]])
    assert class_colours(np.array([[5]])).shape == (1, 1, 3)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex64", ">i2"])
def test_classes_of_every_type(dtype):
    assert codes(np.array([[0, 1, 1]]).astype(dtype)).tolist() == [[0, 1, 1]]


def test_what_is_no_number_is_background():
    odd = np.array([np.nan, np.inf, -np.inf, 1.6, -3, 1e300])
    assert codes(odd)[:5].tolist() == [0, 0, 0, 2, -3]
    assert codes(odd)[5] > 0


def test_edges_are_strong_and_insides_faint():
    classes = np.zeros((6, 7), int)
    classes[1:5, 1:6] = 1
    classes[2, 4] = 2
    over = overlay(classes)
    assert np.array_equal(over[..., 3] > 0, classes > 0)
    strong = over[..., 3] == 230
    assert strong[1, 1:6].all()
    assert strong[2, 3:6].all()  # on both sides of where two classes meet
    assert not strong[3, 2:4].any()
    assert np.array_equal(over[2, 4, :3], COLOURS[1])
    assert overlay(np.zeros((1, 1), int)).tolist()[0][0][3] == 0


def test_a_slice_with_something_over_it():
    grey = np.full((1, 3), 100, np.uint8)
    over = np.array([[[200, 0, 50, 0], [200, 0, 50, 255], [200, 0, 50, 51]]], np.uint8)
    assert blended(grey, over).tolist() == [[[100, 100, 100], [200, 0, 50], [120, 80, 90]]]
