"""Items that follow from their number alone, so that every process can tell every bit of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.support import ct_like, same_bits
from zcache.encoding.voxels import VoxelQuery
from zcache.storage.entry import Entry
from zcache.storage.voxels import open_sets

MISS = object()
_KINDS = 12


@cache
def _volume(kind: int) -> np.ndarray:
    return ct_like((1, 20 + 4 * (kind % 6), 24, 28 + kind), kind)


def warm_up() -> None:
    """Make what items are made of, before processes fork."""
    for kind in range(_KINDS):
        _volume(kind)


def image(i: int) -> np.ndarray:
    return _volume(i % _KINDS) + np.int16(i)


def item(i: int) -> dict[str, Any]:
    """An image, its label, a table of numbers that are looked up, and small things."""
    volume = _volume(i % _KINDS)
    table = (np.arange(2000, dtype="f8") % 97 + i) / 7
    return {"image": image(i), "label": (volume > 300).astype("u1"), "table": table, "i": i, "at": (i, None, f"<{i}>")}


def check(found: Any, i: int) -> None:
    """Compare what was read with item `i`, bit by bit."""
    expected = item(i)
    assert type(found) is dict, f"item {i} is {type(found)}"
    assert list(found) == list(expected), f"item {i} has {list(found)}"
    for name in ("image", "label", "table"):
        assert same_bits(found[name], expected[name]), f"wrong bits in {name!r} of item {i}"
    assert (found["i"], found["at"]) == (i, expected["at"]), f"wrong values in item {i}"


def random_box(shape: Sequence[int], rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    ends = (sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape)
    return tuple((a, b) for a, b in ends)


def query(i: int) -> VoxelQuery:
    """The bright voxels of an item and the others, as a label-guided crop asks for them."""

    def find(read: Callable[[str], np.ndarray]) -> Iterator[tuple[int, list[np.ndarray]]]:
        inside = read("label").reshape(-1) != 0
        yield 0, [np.flatnonzero(inside), np.flatnonzero(~inside)]

    return VoxelQuery({"sets": "stress"}, ("label",), _volume(i % _KINDS).size, find)


def check_picks(entry: Entry, i: int, rng: np.random.Generator) -> int:
    """Pick a few voxels of each set that was added to an entry; return how many, 0 if nothing was added yet."""
    sets = open_sets(entry, query(i))
    if sets is None:
        return 0
    inside = (_volume(i % _KINDS) > 300).reshape(-1)
    for voxels, members in zip(sets, (np.flatnonzero(inside), np.flatnonzero(~inside)), strict=True):
        assert len(voxels) == len(members), f"wrong number of voxels in an index of item {i}"
        for at in rng.integers(0, len(members), 3):
            assert voxels[at] == members[at], f"wrong voxel in an index of item {i}"
    return 6
