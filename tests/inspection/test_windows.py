"""What is black and white."""

from __future__ import annotations

import numpy as np
import pytest

import zcache
from zcache.inspection.windows import PRESETS, is_hounsfield, limits, parse_window

CT = [np.array([[-1024, 3000]], np.int16)]
MR = [np.array([[0.0, 900.0]])]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-160,240", (-160.0, 240.0)),
        ("0.1, 1e3", (0.1, 1000.0)),
        ("lung", "lung"),
        ("Soft_Tissue", "soft tissue"),
        ("soft-tissue", "soft tissue"),
    ],
)
def test_as_it_is_typed(text, found):
    assert parse_window(text) == found


@pytest.mark.parametrize("text", ["", "liver", "1", "1,2,3", "a,b"])
def test_what_is_none(text):
    with pytest.raises(zcache.CacheConfigError, match=r"neither LOW,HIGH .* 'brain', 'soft tissue', 'lung', 'bone'"):
        parse_window(text)


def test_windows_of_ct_are_level_and_width():
    assert {name: ((a + b) / 2, b - a) for name, (a, b) in PRESETS.items()} == {
        "brain": (40, 80),
        "soft tissue": (50, 400),
        "lung": (-600, 1500),
        "bone": (400, 1800),
    }


def test_by_name_for_hounsfield_units_only():
    assert limits("Bone", CT) == (-500.0, 1300.0)
    with pytest.raises(zcache.CacheConfigError, match=r"window='lung' is one of CT in Hounsfield units"):
        limits("lung", MR)


def test_numbers_and_percentiles():
    assert limits((0, 80), MR) == (0.0, 80.0)
    assert limits(None, [np.arange(101.0)]) == (1.0, 99.0)
    assert limits(None, [np.array([3 + 4j, 0j])]) == pytest.approx((0.05, 4.95))
    for wrong in ((1, 1), (2, 1), (np.nan, 1), (0, np.inf)):
        with pytest.raises(zcache.CacheConfigError, match="is not a lower and a higher value"):
            limits(wrong, MR)


@pytest.mark.parametrize(
    ("values", "yes"),
    [
        ([-1000, 60], True),
        ([-100, 40], True),
        ([-99, 40], False),
        ([-2.5, 3.5], False),
        ([0, 255], False),
        ([-1000, 30], False),
        ([-1e6, 1e6], False),
        ([np.nan, -500.0, 90.0, np.inf], True),
        ([np.nan], False),
    ],
)
def test_what_looks_like_hounsfield_units(values, yes):
    assert is_hounsfield([np.array(values)]) is yes
