"""Ways to come to a read, and what must hold whichever of its system calls fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose, EnsureTyped, RandCropByPosNegLabeld

from tests.strategies import assert_same
from tests.stress.faults import Fault, half, one, system_calls
from tests.stress.faults_fill import ITEMS, MISS, QUERY, assert_closed, assert_voxels, heard, new_cache
from tests.support import key
from tests.training.helpers import without_ids
from zcache import PersistentDataset
from zcache.cache import Cache
from zcache.errors import ZCacheError
from zcache.storage.entry import Entry
from zcache.storage.voxels import open_sets

REGION = ((100, 3000),)


def whole(cache: Cache) -> bool:
    """Read an item; return whether it was there."""
    found = cache.get(key(0), MISS)
    if found is not MISS:
        assert_same(ITEMS[0], found)
    return found is not MISS


def region(cache: Cache) -> bool:
    found = cache.get_region(key(0), "label", REGION)
    if found is not None:
        assert_same(np.ascontiguousarray(ITEMS[0]["label"][100:3000]), found)
    return found is not None


def guided(cache: Cache) -> bool:
    """Choose voxels from the index and read a region, as a label-guided crop does."""

    def read(entry: Entry) -> tuple[bool, np.ndarray]:
        sets = open_sets(entry, QUERY)
        if sets is not None:
            assert_voxels(sets, 0)
        return sets is not None, entry.read("label", REGION)

    found = cache.using(key(0), read, None)
    if found is not None:
        assert_same(np.ascontiguousarray(ITEMS[0]["label"][100:3000]), found[1])
    return found is not None


READS = {"whole": whole, "region": region, "guided": guided}


def filled(folder: Path) -> None:
    with new_cache(folder) as cache:
        cache.put(key(0), ITEMS[0], query=lambda _tree: QUERY)


def calls_of_read(read: Callable[[Cache], bool], folder: Path, *, warm: bool) -> list[str]:
    with system_calls() as before:
        cache = new_cache(folder)
        skip = 0
        if warm:
            assert read(cache)
            skip = len(before.names)
        assert read(cache)
        return before.names[skip:]


def read_trial(read: Callable[[Cache], bool], folder: Path, fault: Fault, *, warm: bool, **how: Any) -> bool:
    """Read under a fault, then without it, and check every promise; return whether the item was found."""
    opened = new_cache(folder, **how) if warm else None
    if opened is not None:
        assert read(opened)
    found, raised = False, []
    with heard() as said, system_calls(fault):
        opened = opened or new_cache(folder, **how)
        try:
            found = read(opened)
        except ZCacheError as e:
            raised.append(str(e))
    stats = opened.stats
    assert (stats.hits, stats.misses) == (warm + found, not found)
    errors = stats.read_errors + stats.damaged
    assert len(said) + len(raised) == errors <= stats.misses
    assert not (raised if how.get("on_error") != "raise" else said)
    assert all(key(0) in message for message in said + raised)
    if not found:
        assert errors or fault.error == errno.ENOENT, stats  # what is not there is no error
        assert fault.share not in (half, one), "a short read is continued"
    with heard() as said:
        assert read(opened)
        assert said == []
        opened.close()
    assert_closed(folder)
    return found


def volume() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(5)
    return {
        "image": torch.from_numpy(rng.integers(0, 900, (1, 20, 18, 16)).astype("i2")),
        "label": torch.from_numpy((rng.random((1, 20, 18, 16)) < 0.1).astype("u1")),
    }


DATA = [volume()]


def dataset(cache_dir: Path | None, **how: Any) -> PersistentDataset:
    keys = ("image", "label")
    crop = RandCropByPosNegLabeld(keys, "label", (6, 6, 6), pos=1, neg=1, num_samples=2, image_key="image")
    return PersistentDataset(DATA, Compose([EnsureTyped(keys), crop]), cache_dir, chunks=(10, 9, 8), writers=1, **how)


def patches(ds: PersistentDataset) -> Any:
    """Return what a data set gives, by the same random numbers each time."""
    ds.transform.set_random_state(7)
    result = without_ids(ds[0])
    ds.flush()
    return result


def calls_of_dataset(folder: Path) -> list[str]:
    with heard(), system_calls() as calls, dataset(folder) as ds:
        patches(ds)
        return list(calls.names)


def dataset_trial(expected: Any, folder: Path, fault: Fault) -> bool:
    """Take patches from a data set under a fault, then without it; return whether all that it wrote was stored."""
    with heard() as said, system_calls(fault) as calls:
        ds = dataset(folder)
        assert_same(expected, patches(ds))
    stats = ds.stats
    lost = sum(stats.skipped.values()) + stats.not_indexed
    kinds = (lost > stats.not_indexed, stats.not_indexed > 0, stats.read_errors > 0, stats.damaged > 0)
    assert len(said) == sum(kinds), (said, stats)
    assert stats.hits + stats.misses == 1
    with heard() as said:
        assert_same(expected, patches(ds))
        ds.close()
        with dataset(folder, on_error="raise") as fresh:
            assert_same(expected, patches(fresh))
            assert_same(expected, patches(fresh))
            assert fresh.stats.hits == 2
            assert fresh.stats.pushed_down >= 1
    assert said == []
    if not calls.removals:
        assert list((folder / "staging").iterdir()) == []
    del ds, fresh
    assert_closed(folder)
    return not lost
