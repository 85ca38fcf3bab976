"""Arrays of any dtype as arrays of Zarr's core dtypes: the same bits there and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.strategies import CORE, OTHER, arrays, assert_same, random_array
from zcache.encoding.storable import CORE_DTYPES, from_storable, to_storable
from zcache.errors import EntryDamagedError, UnstorableError


@given(arrays())
def test_any_array_comes_back_with_every_bit(array):
    stored = to_storable(array)
    assert stored.dtype.str in CORE_DTYPES
    assert_same(array, from_storable(np.ascontiguousarray(stored), array.dtype.str, array.shape))
    raw = np.frombuffer(bytearray(stored.tobytes()), np.uint8)
    assert_same(array, from_storable(raw, array.dtype.str, array.shape))


@pytest.mark.parametrize("dtype", CORE)
@pytest.mark.parametrize("order", "<>")
def test_core_dtypes_keep_their_shape_and_become_little_endian(dtype, order):
    array = random_array(dtype, (3, 4), 0).astype(np.dtype(dtype).newbyteorder(order))
    stored = to_storable(array)
    assert stored.shape == (3, 4)
    assert stored.dtype.str == np.dtype(dtype).newbyteorder("<").str
    assert stored.tobytes() == array.astype(stored.dtype).tobytes() or array.dtype.kind in "fc"
    if array.dtype.str == stored.dtype.str:
        assert stored is array


@pytest.mark.parametrize("dtype", OTHER)
def test_other_dtypes_become_bytes_with_one_more_axis(dtype):
    array = random_array(dtype, (2, 5), 0)
    stored = to_storable(array)
    assert stored.dtype == np.uint8
    assert stored.shape == (2, 5, array.dtype.itemsize)
    assert stored.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["S0", "U0"])
def test_strings_without_any_character(dtype):
    array = np.zeros((2, 3), dtype)
    stored = to_storable(array)
    assert_same(array, from_storable(stored, array.dtype.str, (2, 3)))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([object()]), "dtype object"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "a structured array"),
        (np.zeros(2, "V8"), "V8"),
        (np.array(["a"], np.dtypes.StringDType()), "StringDType"),
    ],
)
def test_dtypes_without_fixed_bits_are_refused_by_path(array, says):
    with pytest.raises(UnstorableError, match=says) as e:
        to_storable(array, "['x'][0]")
    assert "['x'][0]" in str(e.value)
    with pytest.raises(UnstorableError, match="the item"):
        to_storable(array)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("<f4", (3,)),
        ("<f4", (5,)),
        ("<f8", (4,)),
        ("<f4", (-4,)),
        ("<f4", (-2, -2)),
        ("<f4", ()),
        ("O", (2,)),
        ("V16", (1,)),
        ("i4,f4", (2,)),
        ("T", (1,)),
        ("nonsense", (4,)),
        ("", (4,)),
        ("<M8[", (2,)),
        ("U", (4,)),
    ],
)
def test_descriptions_that_do_not_fit_are_damage(dtype, shape):
    with pytest.raises(EntryDamagedError):
        from_storable(np.zeros(4, "<u4"), dtype, shape)


def test_the_bits_stay_where_they_can():
    stored = np.arange(6, dtype="<u4")
    back = from_storable(stored, "<u4", (2, 3))
    assert np.shares_memory(back, stored)
