"""Arrays from their codes: the reading side of `zcache.encoding.narrowing`, where the time of a read goes."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Literal

import numpy as np

from zcache.encoding.lookup import BLOCK, MAX_CODES
from zcache.encoding.narrowing import Narrowing

__all__ = ["restore"]

_FLOAT16, _FLOAT32 = np.dtype("f2"), np.dtype("f4")
_FEW = 256
_PAIRED_BYTES = 4  # of a value: two make a word
_PAIRED_BLOCK = 1 << 17
_MIN_PAIRED = 1 << 19  # codes; with fewer, making the table of pairs takes longer than it saves


def restore(codes: np.ndarray, narrowing: Narrowing, out: np.ndarray | None = None) -> np.ndarray:
    """Return the array that `narrow` was given, or that part of it which the codes are for.

    Parameters
    ----------
    codes : numpy.ndarray
        Of the narrowing's code dtype; any strides. Codes beyond the table give its last value.
    narrowing : Narrowing
        From `narrow` or `from_json`.
    out : numpy.ndarray, optional
        Where to write: the codes' shape, the narrowing's dtype, any strides.

    Raises
    ------
    ValueError
        A dtype or shape does not fit.
    """
    if codes.dtype != narrowing.code_dtype:
        raise ValueError(f"the codes are {codes.dtype}, the narrowing is for {narrowing.code_dtype}")
    if out is None:
        out = np.empty(codes.shape, narrowing.dtype)
    elif out.shape != codes.shape or out.dtype != narrowing.dtype:
        raise ValueError(f"out is {out.dtype} {out.shape}, not {narrowing.dtype} {codes.shape}")
    lut = narrowing.lut()
    if narrowing.kind == "cast" and codes.dtype == _FLOAT16:
        # Numpy converts halves one by one; looking them up takes less than half of the time.
        _look_up(_float16_values(narrowing.dtype), codes.view(np.uint16), out, "wrap")
    elif lut is None:
        with np.errstate(invalid="ignore"):  # signalling NaNs, which no writer makes
            np.copyto(out, codes, casting="safe")
    elif codes.max(initial=0) >= lut.size:
        _look_up(lut, codes, out, "clip")
    elif lut.dtype == _FLOAT32 and (divisor := _divisor(lut.tobytes())) is not None:
        _divide(codes, divisor, out)
    else:
        # The fastest mode, but it takes codes far beyond a short table modulo its length by repeated subtraction.
        _look_up(lut, codes, out, "wrap")
    return out


@cache
def _float16_values(dtype: np.dtype) -> np.ndarray:
    """Return every float16 as another float dtype, by its bits."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values: np.ndarray = np.arange(1 << 16, dtype=np.uint16).view(_FLOAT16).astype(dtype)
    return values


@lru_cache(maxsize=64)
def _divisor(values: bytes) -> np.float32 | None:
    """Return what codes have to be divided by to give the values that a float32 table holds, if there is such a number.

    So it is for whole numbers that `ScaleIntensityRange` mapped to 0..1. Dividing is twice as fast as looking up.
    """
    lut = np.frombuffer(values, _FLOAT32)
    if lut.size < 2 or not np.isfinite(lut).all() or not 1 / MAX_CODES <= lut[1] <= 1:  # noqa: PLR2004
        return None
    divisor = np.rint(np.float32(1) / lut[1])
    quotients = np.arange(lut.size, dtype=_FLOAT32) / divisor
    return divisor if (quotients.view(np.uint32) == lut.view(np.uint32)).all() else None


def _divide(codes: np.ndarray, divisor: np.float32, out: np.ndarray) -> None:
    """Write ``codes / divisor`` to `out`, in blocks that stay in the processor's cache."""
    if codes.flags.c_contiguous and out.flags.c_contiguous:
        codes, out = codes.reshape(-1), out.reshape(-1)
    if codes.ndim > 1 and codes[:1].size > BLOCK:
        for part, target in zip(codes, out, strict=True):
            _divide(part, divisor, target)
        return
    rows = max(1, BLOCK // max(codes[:1].size, 1))
    for start in range(0, len(codes), rows):
        block = out[start : start + rows]
        np.copyto(block, codes[start : start + rows])
        np.divide(block, divisor, out=block)


def _look_up(lut: np.ndarray, codes: np.ndarray, out: np.ndarray, mode: Literal["wrap", "clip"]) -> None:
    """Write ``lut[codes]`` to `out`, in blocks: np.take makes 8-byte indices of the codes it gets."""
    if codes.size == 0:
        return
    if codes.flags.c_contiguous and out.flags.c_contiguous:
        codes, out, block = codes.reshape(-1), out.reshape(-1), BLOCK
        if codes.dtype == np.uint8 and lut.itemsize == _PAIRED_BYTES and codes.size >= _MIN_PAIRED:
            even = codes.size // 2 * 2
            out[even:] = lut.take(codes[even:], mode=mode)
            codes, out = codes[:even].view("<u2"), out[:even].view("<u8")
            lut, mode, block = _pairs(lut.tobytes()), "wrap", _PAIRED_BLOCK
        for start in range(0, codes.size, block):
            np.take(lut, codes[start : start + block], mode=mode, out=out[start : start + block])
    elif codes[0].size > BLOCK and codes.ndim > 1:
        for part, target in zip(codes, out, strict=True):
            _look_up(lut, part, target, mode)
    else:
        rows = max(1, BLOCK // codes[0].size)
        for start in range(0, codes.shape[0], rows):
            out[start : start + rows] = lut.take(codes[start : start + rows], mode=mode)


@lru_cache(maxsize=8)  # of 512 KiB each; the volumes of a data set mostly share one
def _pairs(values: bytes) -> np.ndarray:
    """Return the table that looks up two codes at a time: as many steps for twice the values.

    Entry ``a + 256 * b`` holds the bits of the values of the codes a and b; codes beyond the table give its last value.
    """
    lut = np.frombuffer(values, np.uint32)
    bits = np.concatenate([lut, np.repeat(lut[-1:], _FEW - lut.size)]).astype(np.uint64)
    first, second = np.meshgrid(bits, bits)
    pairs: np.ndarray = (first | second << np.uint64(32)).reshape(-1)
    return pairs
