"""Items that are the same in every process, so that what any host reads can be compared bit by bit.

An item is made from a number and a generation. Generations of one number differ in every array, yet the noise in them
has files of one size with one index: only its seal tells one generation's document from another's shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GENERATIONS = 4

_ARRAYS = ("image", "noise", "affine")
_IMAGE = (12, 14, 16)  # 8 chunks
_NOISE = (10, 20, 24)  # 18 chunks


def key(number: int) -> str:
    return f"{number:032x}"


def item(number: int, generation: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng((number, generation))
    return {
        "image": rng.integers(-1000, 2000, _IMAGE, np.int16),
        "noise": rng.integers(0, 256, _NOISE, np.uint8),  # does not compress
        "affine": rng.standard_normal((4, 4)),  # stays in the document
        "id": (number, generation),
    }


def judge(number: int, found: Any) -> str:
    """Return ``"right"``, ``"torn"`` (each part is of some generation, but not of one) or ``"wrong"``."""
    try:
        named, generation = found["id"]
        parts = {name: found[name] for name in _ARRAYS}
    except (KeyError, TypeError, ValueError):
        return "wrong"
    if named == number and len(found) == len(parts) + 1 and _are_of(parts, number, generation):
        return "right"
    known = all(any(_are_of({name: part}, number, g) for g in range(GENERATIONS)) for name, part in parts.items())
    return "torn" if known else "wrong"


def _are_of(parts: dict[str, np.ndarray], number: int, generation: int) -> bool:
    made = item(number, generation)
    return all(
        (part.dtype, part.shape, part.tobytes()) == (made[name].dtype, made[name].shape, made[name].tobytes())
        for name, part in parts.items()
    )
