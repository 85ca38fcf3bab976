"""Lossy codes for true floats: evenly spaced levels or a narrower float, the error measured on the very array."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import numpy as np

from zcache.encoding.lookup import BLOCK, MAX_CODES, bit_view, spread_sample
from zcache.errors import CacheConfigError

__all__ = [
    "LOSSLESS",
    "MAX_SPECIALS",
    "Grid",
    "Precision",
    "ValueRange",
    "cast_floats",
    "integral_valued",
    "quantize",
    "value_range",
]

MAX_SPECIALS = 16
"""Distinct bit patterns of NaN and infinity that get codes of their own."""

PrecisionKind = Literal["lossless", "absolute", "float16", "uint8", "uint16"]

_NAMED: tuple[PrecisionKind, ...] = ("lossless", "float16", "uint8", "uint16")
_SMALL_SAMPLE = 512
_SHRINKS = (1 - 2.0**-20, 0.999, 0.98)


@dataclass(frozen=True, slots=True)
class Precision:
    """How exactly arrays are kept.

    Attributes
    ----------
    kind : str
        ``"lossless"``, ``"absolute"`` (within `max_abs_error`), ``"float16"``, ``"uint8"`` or ``"uint16"`` (levels
        over each array's own range).
    max_abs_error : float
        For ``"absolute"`` only: largest allowed difference of a value, above 0.
    """

    kind: PrecisionKind
    max_abs_error: float = 0.0

    def __post_init__(self) -> None:
        bound = self.max_abs_error
        valid = 0 < bound < math.inf if self.kind == "absolute" else self.kind in _NAMED and bound == 0
        if not valid:
            raise _bad_precision(f"{self.kind}:{bound!r}")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read the user's ``precision=``; also what ``str()`` of a precision gives.

        Parameters
        ----------
        value : str, float or Precision
            The name of a kind, or the largest absolute error.

        Raises
        ------
        CacheConfigError
            Any other value; the message says which work.
        """
        if isinstance(value, cls):
            return value
        try:
            if isinstance(value, str):
                kind, _, bound = value.partition(":")
                if kind == "absolute":
                    return cls("absolute", float(bound))
                return cls(cast("PrecisionKind", value))
            if not isinstance(value, bool) and isinstance(value, numbers.Real):
                return cls("absolute", float(value))
        except (ValueError, OverflowError):
            pass
        raise _bad_precision(value)

    def __str__(self) -> str:
        return f"absolute:{self.max_abs_error!r}" if self.kind == "absolute" else self.kind


LOSSLESS = Precision("lossless")


@dataclass(frozen=True, slots=True)
class Grid:
    """What affine codes stand for.

    Attributes
    ----------
    offset, scale : float
        Code ``c`` below `levels` is ``offset + scale * c``, computed in float64 and rounded once to the dtype.
    levels : int
        How many codes are levels.
    specials : tuple of int
        Bit patterns of the NaNs and infinities that the codes from `levels` on stand for, ascending.
    """

    offset: float
    scale: float
    levels: int
    specials: tuple[int, ...] = ()

    @property
    def n_codes(self) -> int:
        """How many codes there are."""
        return self.levels + len(self.specials)

    def lut(self, dtype: np.dtype) -> np.ndarray:
        """Return the value of each code; not finite where the dtype cannot hold a level."""
        table = np.empty(self.n_codes, dtype)
        with np.errstate(all="ignore"):
            table[: self.levels] = self.offset + self.scale * np.arange(self.levels, dtype=np.float64)
        bit_view(table)[self.levels :] = self.specials
        return table


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The finite range of an array, and the bit patterns of what is not finite in it, ascending."""

    low: float
    high: float
    specials: tuple[int, ...]

    def grid(self, step: float) -> Grid | None:
        """Return levels at most `step` apart that cover the range; None beyond 16 bits.

        Zero within the range is a level, so that a masked background stays exactly zero.
        """
        span = self.high - self.low
        if not 0 < step < math.inf or not span / step < MAX_CODES:  # `not` also catches inf and NaN
            return None
        if self.low < 0 <= self.high:
            offset = -(math.ceil(-self.low / step) * step)
        else:
            offset = self.low
            if span:
                step = span / math.ceil(span / step)
        # Subnormal steps lose precision or, in a process that flushes them to zero, everything.
        if step < np.finfo(np.float64).tiny or not math.isfinite(self.high - offset):
            return None
        # The very arithmetic of `quantize`, so that no value rounds to a level beyond the last.
        grid = Grid(offset, step, round((self.high - offset) * (1 / step)) + 1, self.specials)
        return grid if grid.n_codes <= MAX_CODES else None

    def error_grids(self, max_abs_error: float, dtype: np.dtype) -> list[Grid]:
        """Return grids to try, the coarsest first, whose levels should be within an absolute error of each value."""
        # Rounding a level to the dtype adds up to half of the spacing of its floats.
        rounding = float(np.spacing(dtype.type(max(abs(self.low), abs(self.high))))) / 2
        steps = [2 * (max_abs_error - rounding) * shrink for shrink in _SHRINKS]
        grids = [self.grid(min(step, self.high - self.low or 1.0)) for step in steps if step > 0]
        return [grid for grid in grids if grid is not None]

    def full_grids(self, n_codes: int) -> list[Grid]:
        """Return the grid over the whole range that has at most `n_codes` codes, specials included, if there is one."""
        # Two less: one interval between two levels, and one for the level that zero is moved to.
        grid = self.grid((self.high - self.low) / (n_codes - len(self.specials) - 2) or 1.0)
        return [] if grid is None else [grid]


def integral_valued(flat: np.ndarray) -> bool:
    """Whether all finite values of a float array are integers."""
    for part in (spread_sample(flat, _SMALL_SAMPLE), flat):
        for start in range(0, part.size, BLOCK):
            block = part[start : start + BLOCK]
            whole = np.rint(block) == block
            if not whole.all() and np.isfinite(block[~whole]).any():
                return False
    return True


def value_range(flat: np.ndarray) -> ValueRange | None:
    """Return the range of a float array; None without finite values, or with too many kinds of others."""
    low, high = math.inf, -math.inf
    specials: set[int] = set()
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        block_low, block_high = float(block.min()), float(block.max())
        if not (math.isfinite(block_low) and math.isfinite(block_high)):
            finite = np.isfinite(block)
            specials.update(np.unique(bit_view(block[~finite])).tolist())
            if len(specials) > MAX_SPECIALS:
                return None
            if not finite.any():
                continue
            block_low, block_high = float(block[finite].min()), float(block[finite].max())
        low, high = min(low, block_low), max(high, block_high)
    return ValueRange(low, high, tuple(sorted(specials))) if low <= high else None


def quantize(flat: np.ndarray, grid: Grid, max_abs_error: float = math.inf) -> tuple[np.ndarray, float] | None:
    """Return the codes of a float array on a grid, and the largest error; None if that is above the bound."""
    lut = grid.lut(flat.dtype)
    if not np.isfinite(lut[: grid.levels]).all():
        return None
    codes: np.ndarray = np.empty(flat.size, np.uint8 if grid.n_codes <= np.iinfo(np.uint8).max + 1 else np.uint16)
    if codes.itemsize >= flat.itemsize:
        return None
    specials = np.array(grid.specials, bit_view(flat).dtype)
    scratch = np.empty(min(BLOCK, flat.size), np.float64)
    per_unit = 1 / grid.scale
    worst = 0.0
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        out = codes[start : start + BLOCK]
        work = scratch[: block.size]
        others = np.flatnonzero(~np.isfinite(block)) if specials.size else specials
        np.subtract(block, grid.offset, out=work, dtype=np.float64)
        np.multiply(work, per_unit, out=work)
        np.rint(work, out=work)
        if others.size:
            work[others] = 0
        np.copyto(out, work, casting="unsafe")
        np.subtract(lut.take(out, mode="wrap"), block, out=work, dtype=np.float64)
        if others.size:
            work[others] = 0
            out[others] = grid.levels + np.searchsorted(specials, bit_view(block[others]))
        worst = max(worst, float(np.abs(work, out=work).max()))
        if not worst <= max_abs_error:
            return None
    return codes, worst


def cast_floats(
    flat: np.ndarray, target: np.dtype, max_abs_error: float = math.inf, *, exact_specials: bool = True
) -> tuple[np.ndarray, float] | None:
    """Return a float array cast to a narrower float dtype, and the largest error.

    None if that error is above the bound or not finite, or, with `exact_specials`, if a NaN would lose its payload.
    """
    codes = np.empty(flat.size, target)
    worst = 0.0
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        out = codes[start : start + BLOCK]
        np.copyto(out, block, casting="same_kind")
        back = out.astype(flat.dtype)
        error = np.abs(np.subtract(back, block, dtype=np.float64))
        others = np.flatnonzero(~np.isfinite(block))
        if others.size:
            error[others] = 0
            if exact_specials and (bit_view(back[others]) != bit_view(block[others])).any():
                return None
        worst = max(worst, float(error.max()))
        if not worst <= max_abs_error or worst == math.inf:
            return None
    return codes, worst


def _bad_precision(value: object) -> CacheConfigError:
    return CacheConfigError(
        f"precision={value!r} cannot work; give 'lossless', 'float16', 'uint16', 'uint8', or the largest absolute "
        "error that you accept as a finite number above 0, such as 1e-4"
    )
