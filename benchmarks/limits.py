"""What reading cannot be faster than: copying the values, and decoding the chunks of the store that zcache wrote.

The decoder knows the store from its Zarr metadata and shares no code with zcache's reader, so that nothing which makes
that one slow can make the limit slow too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from benchmarks.arrays import Box

_CRC_BYTES = 4
_PLACE_BYTES = 16
_ABSENT = 2**64 - 1


def memory_copy(values: NDArray[np.float32], part: tuple[slice, ...]) -> NDArray[np.float32]:
    """Return a fresh copy of a part of ``values``."""
    source = values[part]
    out = np.empty(source.shape, source.dtype)
    np.copyto(out, source)
    return out


def touched(box: Box, shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """Return the numbers, in C order, of the chunks that a box overlaps."""
    counts = [-(-extent // size) for extent, size in zip(shape, chunk, strict=True)]
    axes = [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, chunk, strict=True)]
    return [int(np.ravel_multi_index(cell, counts)) for cell in itertools.product(*axes)]


def decoding_alone(array: Path) -> Callable[[Box], NDArray[Any]]:
    """Return a function that decodes the chunks of a box, one after the other, into one and the same buffer.

    Parameters
    ----------
    array
        Directory of a Zarr array of one shard with the index at its end, as zcache writes it. It is read here, so that
        the function finds the encoded chunks in memory; it checks nothing and copies nothing.
    """
    described = json.loads((array / "zarr.json").read_bytes())
    shape, dtype = described["shape"], np.dtype(described["data_type"])
    chunk = described["codecs"][0]["configuration"]["chunk_shape"]
    counts = [-(-extent // size) for extent, size in zip(shape, chunk, strict=True)]
    data = np.frombuffer(array.joinpath("c", *["0"] * len(shape)).read_bytes(), np.uint8)
    index = data[data.size - _CRC_BYTES - _PLACE_BYTES * math.prod(counts) : data.size - _CRC_BYTES]
    places = index.view("<u8").reshape(-1, 2).tolist()
    frames = [data[a : a + n - _CRC_BYTES] if n != _ABSENT else None for a, n in places]
    scratch = np.empty(math.prod(chunk), dtype)

    def decode(box: Box) -> NDArray[Any]:
        for number in touched(box, shape, chunk):
            frame = frames[number]
            if frame is not None:
                blosc.decompress(frame, scratch)
        return scratch

    return decode
