"""What `precision=` would save on an array that had to stay floating point."""

from __future__ import annotations

import math

import numpy as np

from zcache.encoding.chunking import ChunkGrid
from zcache.encoding.narrowing import LOSSLESS, Precision, narrow
from zcache.encoding.shard import BloscCodec, choose_shuffle, frames

__all__ = ["precision_hint"]

_SAMPLE_CHUNKS = 6
_RELATIVE_ERROR = 1e-4  # of the range of values: far below what an image's noise hides


def precision_hint(name: str, array: np.ndarray, grid: ChunkGrid, codec: BloscCodec, stored_nbytes: int) -> str:
    """Say that an array stayed floating point, and what it would take with less than its full precision.

    The sizes are estimates: a few chunks are encoded each way, and the whole is scaled by what they take without loss.

    Parameters
    ----------
    name : str
        Name of the array.
    array : numpy.ndarray
        Floats.
    grid : ChunkGrid
        Its chunks.
    codec : BloscCodec
        Compressor.
    stored_nbytes : int
        What the array takes on disk without loss.
    """
    finite = array[np.isfinite(array)]
    spread = float(finite.max()) - float(finite.min()) if finite.size else 0.0
    options: list[str | float] = ["float16", "uint8"]
    if 0 < spread < math.inf:
        options.insert(0, float(f"{spread * _RELATIVE_ERROR:.0e}"))
    sample = _sample(array, grid)
    lossless = _encoded_bytes(sample, grid, LOSSLESS, codec)
    sizes = [_encoded_bytes(sample, grid, Precision.parse(o), codec) / lossless * stored_nbytes for o in options]
    choices = ", ".join(f"precision={o!r} about {_mb(nbytes)}" for o, nbytes in zip(options, sizes, strict=True))
    return (
        f"{name!r} is kept as {array.dtype}: its values are neither integers nor few. It takes {_mb(stored_nbytes)} "
        f"on disk for {_mb(array.nbytes)} in memory, without loss; with {choices}. Integer-valued arrays such as "
        "labels are exact with any precision."
    )


def _sample(array: np.ndarray, grid: ChunkGrid) -> np.ndarray:
    parts = list(grid.parts())
    step = max(1, len(parts) // _SAMPLE_CHUNKS)
    return np.concatenate([array[part].reshape(-1) for part in parts[step // 2 :: step]])


def _encoded_bytes(sample: np.ndarray, grid: ChunkGrid, precision: Precision, codec: BloscCodec) -> int:
    codes, _ = narrow(sample, precision)
    flat = ChunkGrid(codes.shape, (min(codes.size, math.prod(grid.chunk_shape)),))
    best = BloscCodec(codec.cname, codec.clevel, choose_shuffle(codes, flat, codec.cname, codec.clevel))
    return sum(len(frame) for frame in frames(codes, flat, best))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"
