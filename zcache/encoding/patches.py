"""The chunk shape from which patches of a known size are read soonest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["chunk_shape_for_patches"]

# Measured with `python -m benchmarks.chunks` and `python -m benchmarks.read`: what a chunk costs whatever its size, and
# how fast LZ4 with a shuffle decodes. Only their product matters: a chunk costs as much as 70 KB of decoding.
_CHUNK_S = 20e-6
_DECODED_BYTES_PER_S = 3.5e9

_MIN_BYTES, _MAX_BYTES = 64 * 1024, 512 * 1024
_MIN_EXTENT = 4
_MAX_CANDIDATES = 40


def chunk_shape_for_patches(shape: Sequence[int], itemsize: int, patch: Sequence[int]) -> tuple[int, ...] | None:
    """Choose the extents of a chunk along the trailing axes for reading patches at random places.

    A patch of r elements overlaps ``1 + (r - 1) / c`` chunks of c elements along an axis on average; each chunk costs
    its decoding and a fixed time. Of all even divisions whose chunks hold 64 to 512 KiB, the cheapest is taken.

    Parameters
    ----------
    shape : sequence of int
        Extents of the array along these axes, in elements.
    itemsize : int
        Bytes per stored element.
    patch : sequence of int
        Extents of the patch along the same axes; 0 or less means all of an axis.

    Returns
    -------
    tuple of int or None
        None if the patches take most of the array, so that there is nothing to gain, or if it is small.

    Examples
    --------
    >>> chunk_shape_for_patches((240, 252, 328), 1, (96, 96, 96))
    (48, 51, 55)
    >>> chunk_shape_for_patches((240, 252, 328), 2, (1, -1, -1))
    (1, 252, 328)
    """
    wanted = [min(r, n) if r > 0 else n for r, n in zip(patch, shape, strict=True)]
    if math.prod(wanted) * 2 > math.prod(shape) or math.prod(shape) * itemsize <= _MIN_BYTES:
        return None
    axes = [_divisions(n, r) for n, r in zip(shape, wanted, strict=True)]
    elements: np.ndarray = np.ones((1,) * len(axes))
    touched: np.ndarray = np.ones((1,) * len(axes))
    for i, (extents, r, n) in enumerate(zip(axes, wanted, shape, strict=True)):
        c = np.array(extents, float).reshape([-1 if j == i else 1 for j in range(len(axes))])
        elements = elements * c
        touched = touched * np.minimum(1 + (r - 1) / c, np.ceil(n / c))
    cost = touched * (_CHUNK_S + elements * itemsize / _DECODED_BYTES_PER_S)
    fits = (elements * itemsize >= _MIN_BYTES) & (elements * itemsize <= _MAX_BYTES)
    if not fits.any():
        return None
    best = np.unravel_index(np.argmin(np.where(fits, cost, math.inf)), cost.shape)
    return tuple(extents[i] for extents, i in zip(axes, best, strict=True))


def _divisions(extent: int, patch: int) -> list[int]:
    """Return the lengths of the parts of an axis divided evenly, longest first."""
    least = min(_MIN_EXTENT, extent, patch)
    lengths = (math.ceil(extent / parts) for parts in itertools.count(1))
    distinct = dict.fromkeys(itertools.takewhile(lambda n: n > least, itertools.islice(lengths, extent)))
    return [*itertools.islice(distinct, _MAX_CANDIDATES), least]
