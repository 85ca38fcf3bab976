"""Items of every kind that the format can hold, and the comparison that contract 1 asks for."""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import torch
from hypothesis import strategies as st


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Mode(str, enum.Enum):  # noqa: UP042 - as MONAI's enums are made
    NEAREST = "nearest"


SHAPES = [(), (0,), (3, 0), (1,), (7,), (1, 1, 11, 9), (3, 4, 5), (2, 1, 3, 4), (2, 3, 2, 3, 2)]
CORE = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
OTHER = ["S5", "U3", "M8[ns]", "m8[D]", "g", "G"]


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits at all: NaN payloads, negative zeros, denormals."""
    dt = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dt.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dt.kind in "US":
        return np.array(rng.integers(0, 99999, shape).astype(str).astype(dt))
    if dt.char in "gG":
        return np.asarray(rng.standard_normal(shape).astype(dt))
    n = math.prod(shape) * dt.itemsize
    return np.frombuffer(rng.bytes(n), dt).reshape(shape).copy()


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(CORE + OTHER)))
    if draw(st.booleans()):
        dtype = dtype.newbyteorder(draw(st.sampled_from("<>")))
    array = random_array(dtype.str, draw(st.sampled_from(SHAPES)), draw(st.integers(0, 2**32 - 1)))
    match draw(st.integers(0, 3)):
        case 0:
            return array
        case 1:
            return np.asfortranarray(array)
        case 2 if array.ndim:
            return np.flip(array)
        case _ if array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
    return array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=True, allow_infinity=True),
    st.complex_numbers(allow_nan=True),
    st.text(),
    st.binary(),
    st.sampled_from(
        [Colour.RED, Colour.BLUE, Mode.NEAREST, Ellipsis, np.dtype(">f4"), np.dtype("U7"), np.dtype("M8[s]")]
    ),
    st.sampled_from([Path("a/b.nii.gz"), PurePosixPath("/x/y"), PureWindowsPath("C:\\z")]),
    st.sampled_from([np.float32("nan"), np.float64(-0.0), np.int8(-3), np.bool_(True), np.str_("x"), np.complex64(1j)]),
    st.sampled_from([np.datetime64("2026-12-01"), np.longdouble(1) / 3, np.bytes_(b"ab")]),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
    st.builds(slice, st.integers(-9, 9), st.none(), st.integers(1, 9)),
    st.builds(bytearray, st.binary()),
)
hashables = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.binary(),
    st.sampled_from([Colour.RED, Mode.NEAREST]),
    st.tuples(st.integers(), st.text()),
    st.frozensets(st.integers()),
)


def trees(*more: st.SearchStrategy) -> st.SearchStrategy:
    return st.recursive(
        st.one_of(scalars, arrays(), *more),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(st.text(), inner, max_size=4),
            st.dictionaries(hashables, inner, max_size=4),
            st.dictionaries(st.sampled_from(["$tuple", "$dict", "a"]), inner, max_size=2),
            st.dictionaries(hashables, inner, max_size=3).map(OrderedDict),
            st.sets(hashables, max_size=4),
            st.frozensets(hashables, max_size=4),
        ),
        max_leaves=12,
    )


def assert_same(a: object, b: object, where: str = "item") -> None:
    """Same types, container types, dtypes, shapes, and every bit."""
    assert type(a) is type(b) or (type(a) is np.memmap and type(b) is np.ndarray), f"{where}: {type(a)} != {type(b)}"
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
            assert_same(ka, kb, f"{where} key {ka!r}")
            assert_same(va, vb, f"{where}[{ka!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, set | frozenset):
        assert a == b, where
        assert {(type(x), x) for x in a} == {(type(x), x) for x in b}, where
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), where
    elif isinstance(a, complex) and not isinstance(a, np.generic):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag), where
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype.str == b.dtype.str, where
        assert a.shape == b.shape, where
        assert value_bytes(a) == value_bytes(b), where
    elif hasattr(a, "untyped_storage"):
        assert_same_tensor(a, b, where)
    else:
        assert a == b, where


def value_bytes(a: np.ndarray | np.generic) -> bytes:
    if a.dtype.char in "gG":  # the padding bytes of an extended float are not part of its value
        return repr(a.tolist()).encode()
    return a.tobytes()


def assert_same_tensor(a, b, where: str) -> None:
    assert a.dtype == b.dtype, where
    assert a.shape == b.shape, where
    assert a.device == b.device, where
    bits = [x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b)]
    if bits[0].numel():
        assert torch.equal(*(x.view(torch.uint8) for x in bits)), where
    if hasattr(a, "meta"):
        assert_same(a.meta, b.meta, f"{where}.meta")
        assert_same(a.applied_operations, b.applied_operations, f"{where}.applied_operations")
        assert a.is_batch == b.is_batch, where
        assert_same(a.affine, b.affine, f"{where}.affine")


__all__ = [
    "CORE",
    "OTHER",
    "SHAPES",
    "Colour",
    "Mode",
    "arrays",
    "assert_same",
    "random_array",
    "scalars",
    "trees",
]
