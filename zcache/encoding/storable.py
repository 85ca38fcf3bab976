"""Numpy arrays of any dtype as arrays of Zarr's core data types, and back by reinterpreting bits."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from zcache.errors import EntryDamagedError, UnstorableError

__all__ = ["CORE_DTYPES", "from_storable", "parse_dtype", "to_storable"]

CORE_DTYPES = frozenset(
    np.dtype(t).newbyteorder("<").str
    for t in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
)
"""The data types of Zarr v3's core that every reader knows, as little-endian numpy type strings."""

_FIXED_KINDS = "biufcSUMm"  # kinds with fixed bits; dtypes outside CORE_DTYPES are kept as raw bytes
# What `dtype.str` gives. Numpy reads much more, lists of fields of any length with it, which it has Python parse.
_DTYPE = re.compile(r"[<>|][A-Za-z?][0-9]{0,10}(\[[0-9A-Za-z/]{1,30}\])?")
_MAX_CODE_POINT = 0x10FFFF
_MAX_EMPTY_STRINGS = 1 << 20


def to_storable(array: np.ndarray, path: str = "") -> np.ndarray:
    """Return the same bits as a little-endian array of a core dtype.

    Arrays of a core dtype keep their shape, whatever their byte order. Strings, dates and extended floats become
    uint8 with one more axis, at the end, of the item size in bytes.

    Parameters
    ----------
    array : numpy.ndarray
        Any strides and byte order.
    path : str
        Where the array is in its item, for the error.

    Raises
    ------
    UnstorableError
        A structured or object dtype, or strings of what are no characters.
    """
    if array.dtype.kind not in _FIXED_KINDS:
        what = "a structured array" if array.dtype.names else f"an array of dtype {array.dtype}"
        raise UnstorableError(
            f"{path or 'the item'} is {what}, which a cache entry cannot hold: store its fields, or numbers, "
            "as arrays of their own"
        )
    if not _is_text(array):
        raise UnstorableError(f"{path or 'the item'} is an array of {array.dtype} that holds no characters of Unicode")
    little = array.dtype.newbyteorder("<")
    if little.str in CORE_DTYPES:
        # Bytes are swapped as integers would be: a conversion of floats might quieten a signalling NaN.
        return array if array.dtype.str == little.str else array.byteswap().view(little)
    itemsize = array.dtype.itemsize
    if itemsize == 0 or array.size == 0:
        return np.zeros((*array.shape, itemsize), np.uint8)
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)


def from_storable(stored: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Undo `to_storable`.

    Parameters
    ----------
    stored : numpy.ndarray
        What `to_storable` returned, or its bytes as 1-D uint8; C-contiguous. Not copied where the bits can stay.
    dtype : str
        The original dtype's ``str``, byte order included. From disk, so checked.
    shape : tuple of int
        The original shape.

    Raises
    ------
    EntryDamagedError
        The dtype is none that `to_storable` takes, or the sizes do not fit.
    """
    original, swapped = _original(dtype)
    if any(n < 0 for n in shape) or math.prod(shape) * original.itemsize != stored.nbytes:
        raise EntryDamagedError(f"the entry holds {stored.nbytes} bytes for an array {shape} of {dtype}")
    if original.itemsize == 0 or stored.nbytes == 0:
        # Numpy makes one character of none: memory for strings that take none on disk.
        if math.prod(shape) > _MAX_EMPTY_STRINGS:
            raise EntryDamagedError(f"the entry holds {math.prod(shape)} empty strings")
        return np.zeros(shape, original)
    flat = stored.reshape(-1).view(np.uint8)
    if swapped is not None:
        flat = flat.view(swapped).byteswap()
    array = flat.view(original).reshape(shape)
    if not _is_text(array):
        raise EntryDamagedError(f"the entry holds an array of {dtype} that holds no characters of Unicode")
    return array


def _is_text(array: np.ndarray) -> bool:
    """Whether every code point of an array of strings is one: of another, Python makes no string. True for others."""
    if array.dtype.kind != "U" or not array.nbytes:
        return True
    points = np.ascontiguousarray(array).reshape(-1).view(array.dtype.str[0] + "u4")
    return int(points.max()) <= _MAX_CODE_POINT


@lru_cache(maxsize=64)
def _original(text: str) -> tuple[np.dtype[Any], np.dtype[Any] | None]:
    """Return the dtype of a ``dtype.str``, and the one of the stored bits if the bytes of these have to be swapped."""
    original = parse_dtype(text)
    little = original.newbyteorder("<")
    return original, little if little.str in CORE_DTYPES and original.str != little.str else None


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype of a ``dtype.str`` from disk.

    Raises
    ------
    EntryDamagedError
        It names none, or none that `to_storable` takes.
    """
    if _DTYPE.fullmatch(text) is None:
        raise EntryDamagedError(f"the entry names an unknown dtype {text!r:.100}")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError) as e:
        raise EntryDamagedError(f"the entry names an unknown dtype {text!r}") from e
    if dtype.kind not in _FIXED_KINDS:
        raise EntryDamagedError(f"the entry names the dtype {text!r}, which no entry may hold")
    return dtype
