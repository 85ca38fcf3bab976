"""Ways to come to a write, and what must hold whichever of its system calls fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.strategies import assert_same
from tests.stress.faults import REASONS, Fault, open_files, system_calls
from tests.support import key, shard_file
from zcache.cache import Cache
from zcache.encoding.voxels import VoxelQuery, VoxelSet
from zcache.errors import EntryDamagedError, ZCacheError, ZCacheWarning
from zcache.stats import CacheStats
from zcache.storage import pool
from zcache.storage.store import _this_process, sweep_staging
from zcache.storage.voxels import open_sets

MISS = object()
SHAPE = (5440,)  # one axis: few directories, few calls


def item(i: int) -> dict[str, Any]:
    """An array of two chunks, and what stays in the document."""
    label = (np.random.default_rng(i).random(SHAPE) < 0.1).astype("u1")
    return {"label": label, "affine": np.eye(4), "id": (i, "ä", None)}


ITEMS = [item(i) for i in range(3)]


def _find(read: Callable[[str], np.ndarray]) -> Iterator[tuple[int, list[np.ndarray]]]:
    members = read("label").reshape(-1)
    yield 0, [np.flatnonzero(members), np.flatnonzero(members == 0)]


QUERY = VoxelQuery("voxels of the label", ("label",), SHAPE[0], _find)


def new_cache(folder: Path, **how: Any) -> Cache:
    return Cache(folder / "c", chunks=(2720,), writers=1, **how)


def assert_voxels(sets: list[VoxelSet], i: int) -> None:
    label = ITEMS[i]["label"]
    for found, value in zip(sets, (1, 0), strict=True):
        members = np.flatnonzero(label == value)
        assert [len(found), *(found[j] for j in (0, 7, -1))] == [len(members), *members[[0, 7, -1]]]


class Fill:
    """A fresh directory, and the first entries in it."""

    query: Callable[[Any], VoxelQuery] | None = None

    def __init__(self, folder: Path, n: int, **how: Any) -> None:
        self.folder = folder
        self.n = n
        self.how = how
        self.before = CacheStats()  # what was counted before the fault

    def open(self) -> Cache:
        return new_cache(self.folder, **self.how)

    def put(self, cache: Cache, i: int) -> None:
        assert_same(ITEMS[i], cache.put(key(i), ITEMS[i], query=self.query))
        cache.flush()

    def at_end(self) -> None:
        """Check what else must have stayed as it was."""


class NextProcess(Fill):
    """The first entries of a process, where another one lives and a third one died."""

    def __init__(self, folder: Path, n: int, **how: Any) -> None:
        super().__init__(folder, n, **how)
        with new_cache(folder) as cache_:
            cache_.put(key(9), ITEMS[0])
        alive = _this_process()
        self._alive = self._staged("a" * 32, alive)
        self._dead = self._staged("b" * 32, {**alive, "pid": dead_pid()})

    def _staged(self, name: str, owner: dict[str, Any]) -> Path:
        directory = self.folder / "c" / "staging" / name
        directory.mkdir()
        (directory / "zarr.json").write_text("half an entry")
        (directory / "owner.json").write_text(json.dumps(owner))
        return directory

    def at_end(self) -> None:
        assert (self._alive / "zarr.json").read_text() == "half an entry", "taken from a process that lives"
        if self._dead.exists():  # it could not be removed, or no more than its owner.json
            os.utime(self._dead, (0, 0))
            sweep_staging(self._dead.parent)
        assert not self._dead.exists()
        shutil.rmtree(self._alive)


class Later(Fill):
    """Entries after the first one of a process."""

    def __init__(self, folder: Path, n: int, **how: Any) -> None:
        super().__init__(folder, n, **how)
        self._cache = new_cache(folder, **how)
        self.prepare()
        self.before = self._cache.stats

    def prepare(self) -> None:
        self._cache.put(key(9), ITEMS[0])
        self._cache.flush()

    def open(self) -> Cache:
        return self._cache


class Healing(Later):
    """Entries that take the place of damaged ones."""

    def prepare(self) -> None:
        with new_cache(self.folder) as cache_:
            for i in range(self.n):
                cache_.put(key(i), ITEMS[i])
        for i in range(self.n):
            shard = shard_file(cache_._store, key(i), "label", len(SHAPE))
            data = bytearray(shard.read_bytes())
            data[20] ^= 1
            shard.write_bytes(data)
            with contextlib.suppress(EntryDamagedError):
                assert self._cache.get(key(i), MISS) is MISS


class Indexed(Later):
    """Entries that are indexed as soon as they are written."""

    query = staticmethod(lambda _tree: QUERY)


class IndexedLater(Later):
    """Entries that get an index when they are read."""

    def prepare(self) -> None:
        for i in range(self.n):
            self._cache.put(key(i), ITEMS[i])
        self._cache.flush()

    def put(self, cache: Cache, i: int) -> None:
        cache.add_index(key(i), QUERY)
        cache.flush()


def calls_of(kind: type[Fill], folder: Path, **how: Any) -> list[str]:
    """Record the calls of one entry, from the opening of the cache on."""
    with heard():
        fill = kind(folder, 1, **how)
        with system_calls() as calls:
            opened = fill.open()
            fill.put(opened, 0)
            names = list(calls.names)
        opened.close()
    shutil.rmtree(folder)
    return names


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings, all of zcache's own kind."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [str(w.message) for w in caught]
    assert all(w.category is ZCacheWarning for w in caught), said


def trial(kind: type[Fill], folder: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch, **how: Any) -> int:
    """Fill a cache under a fault, then without it, and check every promise.

    Returns
    -------
    int
        Entries and indexes that were counted as not stored.
    """
    n = 2 if fault.lasting else 1
    raised = []
    with heard():
        fill = kind(folder, n, **how)
    with heard() as said, system_calls(fault) as calls:
        opened = fill.open()
        for i in range(n):
            try:
                fill.put(opened, i)
            except ZCacheError as e:  # with on_error="raise"
                raised.append(str(e))
    lost = assert_counted(opened, fault, said, raised, fill)
    with heard():
        whole = assert_absent_or_whole(folder, fill.before.damaged)
        if not lost and not opened.stats.already_stored:
            assert {key(i) for i in range(n)} <= whole
        with monkeypatch.context() as m:
            m.setattr(pool, "_IDLE_S", 0.0)  # the thread ends after what is put next
            assert_works(opened, n)
            opened.close()
    fill.at_end()
    if not calls.removals:
        assert list((folder / "c" / "staging").iterdir()) == []
    del fill, opened
    assert_closed(folder)
    shutil.rmtree(folder)
    return lost


def assert_counted(opened: Cache, fault: Fault, said: list[str], raised: list[str], fill: Fill) -> int:
    """Check that what was lost is counted, for the right reason, and told; return how much it is."""
    stats = opened.stats
    skipped = sum(stats.skipped.values())
    assert set(stats.skipped) <= {REASONS.get(fault.error, "io_error")}, stats
    if not isinstance(fill, IndexedLater):
        assert stats.stored + stats.already_stored + skipped == fill.before.stored + fill.n, stats
    lost = skipped + stats.not_indexed
    if fill.how.get("on_error") == "raise":
        assert said == []
        assert len(raised) == lost, (raised, stats)
    else:
        assert raised == []
        assert len(said) == (skipped > 0) + (stats.not_indexed > 0), (said, stats)  # one of each kind
    for message in said + raised:
        assert any(key(i) in message for i in range(fill.n)), message
        # What is denied although it is there shows by what comes of it.
        assert fault.error in (0, errno.ENOENT) or os.strerror(fault.error) in message, message
    return lost


def assert_absent_or_whole(folder: Path, damaged: int) -> set[str]:
    """Read all that is visible in a cache of its own, as another process would; return the entries that are whole."""
    whole = set()
    with new_cache(folder) as fresh:
        for name in fresh.keys():  # noqa: SIM118 - no mapping
            found = fresh.get(name, MISS)
            if found is MISS:
                continue
            whole.add(name)
            i = int(name, 16) % 9
            assert_same(ITEMS[i], found)
            sets = fresh.using(name, lambda entry: open_sets(entry, QUERY), None)
            if sets is not None:
                assert_voxels(sets, i)
        assert fresh.stats.damaged == fresh.stats.misses <= damaged
    return whole


def assert_works(opened: Cache, n: int) -> None:
    """Use a cache as a program does, now that nothing is in its way."""
    skipped = opened.stats.skipped
    for i in range(n):
        found = MISS
        with contextlib.suppress(EntryDamagedError):
            found = opened.get(key(i), MISS)
        if found is MISS:
            assert_same(ITEMS[i], opened.put(key(i), ITEMS[i]))
            opened.flush()
            found = opened.get(key(i), MISS)
        assert_same(ITEMS[i], found)
    assert opened.stats.skipped == skipped


def assert_closed(folder: Path) -> None:
    if open_files(folder):
        gc.collect()
    assert open_files(folder) == 0, "file descriptors leak"


@cache
def dead_pid() -> int:
    """Return the id of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid
