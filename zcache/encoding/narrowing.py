"""Arrays in the narrowest form that gives every bit back, or, on request, every value within a verified error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from zcache.encoding.lookup import BLOCK, MAX_CODES, bit_view, find_table, spread_sample
from zcache.encoding.quantize import (
    LOSSLESS,
    MAX_SPECIALS,
    Grid,
    Precision,
    cast_floats,
    integral_valued,
    quantize,
    value_range,
)
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = ["LOSSLESS", "Narrowing", "Precision", "from_json", "narrow", "to_json"]

NarrowingKind = Literal["identity", "cast", "table", "affine"]

_DTYPES = {
    f"{'|' if t[1:] == '1' else '<'}{t}": np.dtype(t)
    for t in ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INTS = tuple(np.dtype(t) for t in ("u1", "i1", "u2", "i2", "u4", "i4"))
_CODE_DTYPES = _INTS[0], _INTS[2]
_FLOAT16, _FLOAT32 = np.dtype("f2"), np.dtype("f4")
_SMALL_SAMPLE = 512
_FEW = 256


@dataclass(frozen=True, eq=False)
class Narrowing:
    """How to restore an array from its codes.

    Attributes
    ----------
    kind : str
        ``"identity"``: the codes are the values. ``"cast"``: a narrower number type. ``"table"``: the codes index
        `table`. ``"affine"``: the codes index the values of `grid`.
    dtype : numpy.dtype
        What is restored, native byte order.
    code_dtype : numpy.dtype
        What is stored, native byte order.
    table : numpy.ndarray or None
        1-D, sorted in IEEE 754's totalOrder of the bit patterns, so that codes rank the values.
    grid : Grid or None
        Offset, scale, number of levels and special values of affine codes.
    max_abs_error : float
        Largest difference from the original over its finite values, measured on that very array.
    """

    kind: NarrowingKind
    dtype: np.dtype
    code_dtype: np.dtype
    table: np.ndarray | None = None
    grid: Grid | None = None
    max_abs_error: float = 0.0

    def lut(self) -> np.ndarray | None:
        """Return the value of each code, read-only, where restoring is a look-up."""
        return self._lut

    @cached_property
    def _lut(self) -> np.ndarray | None:
        lut = self.table if self.grid is None else self.grid.lut(self.dtype)
        if lut is not None:
            lut = lut.view()
            lut.flags.writeable = False
        return lut


def narrow(array: np.ndarray, precision: Precision = LOSSLESS) -> tuple[np.ndarray, Narrowing]:
    """Return an array's codes and how to restore it.

    Every form is proven on the very array before it is used: by bits when lossless, so that −0.0 and NaN payloads
    survive, by the largest error otherwise. Integer-valued arrays are never made lossy.

    Parameters
    ----------
    array : numpy.ndarray
        Booleans, integers, floats of 2 to 8 bytes or complex numbers; C-contiguous, native byte order.
    precision : Precision
        What may be lost.

    Returns
    -------
    codes : numpy.ndarray
        C-contiguous, of the array's shape; the array itself where nothing is gained.
    narrowing : Narrowing
        For `zcache.encoding.restoring.restore`.

    Raises
    ------
    UnstorableError
        Another dtype or layout: see `zcache.encoding.storable.to_storable`.
    """
    dtype = array.dtype
    if dtype not in _DTYPE_NAMES or not array.flags.c_contiguous:
        raise UnstorableError(f"only C-contiguous arrays of native numbers can be narrowed, not {dtype}")
    found = None
    with np.errstate(all="ignore"):  # overflow and NaN are found by looking at the result
        if array.size and dtype.kind in "iu":
            found = _narrow_ints(array)
        elif array.size and dtype.kind == "f":
            found = _narrow_integral(array)
            if found is None and precision != LOSSLESS:
                found = _narrow_lossy(array, precision)
            if found is None:
                found = _narrow_floats(array)
    return found or (array, Narrowing("identity", dtype, dtype))


def to_json(narrowing: Narrowing) -> dict[str, Any]:
    """Return a narrowing as plain JSON, all but its table, which is an array to store beside it."""
    data: dict[str, Any] = {
        "kind": narrowing.kind,
        "dtype": _DTYPE_NAMES[narrowing.dtype],
        "code_dtype": _DTYPE_NAMES[narrowing.code_dtype],
        "max_abs_error": narrowing.max_abs_error.hex(),
    }
    if narrowing.table is not None:
        data["entries"] = narrowing.table.size
    if narrowing.grid is not None:
        grid = narrowing.grid
        data |= {"offset": grid.offset.hex(), "scale": grid.scale.hex(), "levels": grid.levels}
        data["specials"] = [hex(bits) for bits in grid.specials]
    return data


def from_json(data: Any, table: np.ndarray | None = None) -> Narrowing:
    """Read what `to_json` wrote, trusting nothing.

    Parameters
    ----------
    data : dict
        Parsed JSON.
    table : numpy.ndarray, optional
        The table of a ``"table"`` narrowing, of its dtype.

    Raises
    ------
    EntryDamagedError
        `narrow` would not have made this; the message says why.
    """
    try:
        return _read(data, table)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise EntryDamagedError(f"the entry's narrowing is damaged: {type(e).__name__}: {e!s:.200}") from e


def _smallest_int(low: int, high: int, below: int) -> np.dtype | None:
    """Return the smallest integer dtype that holds a range and has fewer than `below` bytes."""
    for dtype in _INTS:
        info = np.iinfo(dtype)
        if dtype.itemsize < below and info.min <= low and high <= info.max:
            return dtype
    return None


def _narrow_ints(array: np.ndarray) -> tuple[np.ndarray, Narrowing] | None:
    target = _smallest_int(int(array.min()), int(array.max()), array.dtype.itemsize)
    return None if target is None else (array.astype(target), Narrowing("cast", array.dtype, target))


def _narrow_integral(array: np.ndarray) -> tuple[np.ndarray, Narrowing] | None:
    """Return floats as a narrower integer dtype if that keeps every bit."""
    flat = array.reshape(-1)
    # The sample first: arrays of true floats leave here in microseconds.
    target = _integral_target(spread_sample(flat, _SMALL_SAMPLE)) and _integral_target(flat)
    return None if target is None else (array.astype(target), Narrowing("cast", array.dtype, target))


def _integral_target(flat: np.ndarray) -> np.dtype | None:
    low, high = 0, 0
    target = None
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        # Twice the width of the widest target: what does not fit shows, however the processor converts it.
        ints = block.astype(np.int64 if flat.itemsize > _FLOAT32.itemsize else np.int32)
        if (bit_view(ints.astype(flat.dtype)) != bit_view(block)).any():
            return None
        low, high = min(low, int(ints.min())), max(high, int(ints.max()))
        target = _smallest_int(low, high, flat.itemsize)
        if target is None:
            return None
    return target


def _narrow_floats(array: np.ndarray) -> tuple[np.ndarray, Narrowing] | None:
    """Return floats that are not integers in a narrower form that keeps every bit."""
    return _narrow_to_table(array, MAX_CODES) or _narrow_to_float32(array)


def _narrow_to_table(array: np.ndarray, max_entries: int) -> tuple[np.ndarray, Narrowing] | None:
    found = find_table(array, max_entries)
    if found is None:
        return None
    codes, table = found
    return codes, Narrowing("table", array.dtype, codes.dtype, table=table)


def _narrow_to_float32(array: np.ndarray) -> tuple[np.ndarray, Narrowing] | None:
    flat = array.reshape(-1)
    if array.itemsize <= _FLOAT32.itemsize or not _survives_float32(spread_sample(flat, _SMALL_SAMPLE)):
        return None
    codes = np.empty(flat.size, _FLOAT32)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        if not _survives_float32(block):
            return None
        codes[start : start + BLOCK] = block
    return codes.reshape(array.shape), Narrowing("cast", array.dtype, _FLOAT32)


def _survives_float32(block: np.ndarray) -> bool:
    small = block.astype(_FLOAT32)
    if (bit_view(small.astype(block.dtype)) != bit_view(block)).any():
        return False
    # Subnormals are left alone: a process that flushes them to zero (torch.set_flush_denormal) would restore zeros.
    magnitudes = np.abs(small)
    return not bool(((magnitudes > 0) & (magnitudes < np.finfo(_FLOAT32).tiny)).any())


def _narrow_lossy(array: np.ndarray, precision: Precision) -> tuple[np.ndarray, Narrowing] | None:
    """Return floats in the narrowest form that the precision allows; None if only a lossless one is left."""
    flat = array.reshape(-1)
    if integral_valued(flat):
        return None
    if precision.kind == "float16":
        return _narrow_to_table(array, MAX_CODES) or _narrow_to_floats(array, exact_specials=False)
    values = value_range(flat)
    if values is None:
        return None
    bound = math.inf
    if precision.kind == "absolute":
        bound = precision.max_abs_error
        grids = values.error_grids(bound, array.dtype)
    else:
        grids = values.full_grids(_FEW if precision.kind == "uint8" else MAX_CODES)
    in_bytes = bool(grids) and grids[0].n_codes <= _FEW
    # Codes of a table lose nothing, so they come first where they are as small.
    found = _narrow_to_table(array, _FEW if in_bytes else MAX_CODES) or _narrow_to_grid(array, grids, bound)
    return found if found or precision.kind != "absolute" else _narrow_to_floats(array, bound)


def _narrow_to_grid(array: np.ndarray, grids: list[Grid], bound: float) -> tuple[np.ndarray, Narrowing] | None:
    for grid in grids:
        found = quantize(array.reshape(-1), grid, bound)
        if found is not None:
            codes = found[0].reshape(array.shape)
            return codes, Narrowing("affine", array.dtype, codes.dtype, grid=grid, max_abs_error=found[1])
    return None


def _narrow_to_floats(
    array: np.ndarray, bound: float = math.inf, *, exact_specials: bool = True
) -> tuple[np.ndarray, Narrowing] | None:
    for target in (_FLOAT16, _FLOAT32):
        if target.itemsize < array.itemsize and (target == _FLOAT16 or bound < math.inf):
            found = cast_floats(array.reshape(-1), target, bound, exact_specials=exact_specials)
            if found is not None:
                return found[0].reshape(array.shape), Narrowing("cast", array.dtype, target, max_abs_error=found[1])
    return None


def _read(data: Any, table: np.ndarray | None) -> Narrowing:
    kind = data["kind"]
    dtype, code_dtype = _DTYPES[data["dtype"]], _DTYPES[data["code_dtype"]]
    error = _finite(data["max_abs_error"])
    pair = dtype.kind + code_dtype.kind
    possible = {
        "identity": code_dtype == dtype,
        "cast": np.can_cast(code_dtype, dtype) and pair in {"ii", "iu", "uu", "fi", "fu", "ff"},
        "table": code_dtype in _CODE_DTYPES and dtype.kind == "f",
        "affine": code_dtype in _CODE_DTYPES and dtype.kind == "f",
    }
    if not possible[kind] or (kind != "identity" and code_dtype.itemsize >= dtype.itemsize) or error < 0:
        raise ValueError(f"kind {kind!r} from {code_dtype} to {dtype} with an error of {error}")
    if (table is not None) != (kind == "table"):
        raise ValueError(f"kind {kind!r} {'without' if table is None else 'with'} a table")
    grid = None
    if table is not None:
        entries = _count(data["entries"], np.iinfo(code_dtype).max + 1)
        if table.dtype != dtype or table.shape != (entries,):
            raise ValueError(f"a table {table.dtype} {table.shape} instead of {entries} entries of {dtype}")
    elif kind == "affine":
        grid = _read_grid(data, dtype, np.iinfo(code_dtype).max + 1)
    return Narrowing(kind, dtype, code_dtype, table=table, grid=grid, max_abs_error=error)


def _read_grid(data: Any, dtype: np.dtype, n_codes: int) -> Grid:
    levels = _count(data["levels"], n_codes)
    if type(data["specials"]) is not list or len(data["specials"]) > min(MAX_SPECIALS, n_codes - levels):
        raise ValueError("the special values are not a list, or too many")
    specials = tuple(int(text, 16) for text in data["specials"])
    grid = Grid(_finite(data["offset"]), _finite(data["scale"]), levels, specials)
    if np.isfinite(grid.lut(dtype)).tolist() != [True] * levels + [False] * len(specials):
        raise ValueError(f"levels that {dtype} cannot hold, or special values that are finite")
    return grid


def _finite(text: Any) -> float:
    value = float.fromhex(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite")
    return value


def _count(value: Any, limit: int) -> int:
    if type(value) is not int or not 1 <= value <= limit:
        raise ValueError(f"{value!r} is not a count from 1 to {limit}")
    return value
