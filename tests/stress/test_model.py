"""A cache against a dict: whatever callers, other processes and the disk do, a read is right, or a miss that may be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import zcache.storage.store as zs
from tests.stress.board import watch
from tests.stress.items import MISS, random_box
from tests.support import ct_like, in_fork, key, same_bits
from zcache.cache import Cache
from zcache.encoding.voxels import VoxelQuery
from zcache.storage.entry import Entry
from zcache.storage.voxels import open_sets

EXAMPLES = int(os.environ.get("ZCACHE_STRESS_EXAMPLES", "60"))
N_KEYS, N_VERSIONS, N_CACHES = 3, 3, 2
ABSENT, DAMAGED = -1, -2  # what may lie on disk under a key, beside the versions 0, 1 and 2
SHAPE = (1, 12, 24, 20)
DAY_S = 86_400

keys = st.integers(0, N_KEYS - 1)
versions = st.integers(0, N_VERSIONS - 1)
caches = st.integers(0, N_CACHES - 1)
seeds = st.integers(0, 2**32 - 1)


@cache
def image(k: int, version: int) -> np.ndarray:
    """What is put: versions differ, so that it shows which one is read."""
    return ct_like(SHAPE, 10 * k + version)


def item(k: int, version: int) -> dict[str, Any]:
    return {"image": image(k, version).copy(), "mask": image(k, version)[0] > 300, "version": version, "k": [k, None]}


def version_of(found: Any, k: int) -> int:
    """Check every bit of what was read under a key; return which version it is."""
    version: int = found["version"]
    expected = item(k, version)
    assert list(found) == list(expected)
    assert same_bits(found["image"], expected["image"])
    assert same_bits(found["mask"], expected["mask"])
    assert found["k"] == expected["k"]
    return version


def query() -> VoxelQuery:
    def find(read: Callable[[str], np.ndarray]) -> Iterator[tuple[int, list[np.ndarray]]]:
        yield 0, [np.flatnonzero(read("image").reshape(-1) > 300)]

    return VoxelQuery({"sets": "bright"}, ("image",), int(np.prod(SHAPE)), find)


@cache
def dead_process() -> str:
    """What stands in the staging of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        owner = {"host": zs._host(), "pid": child.pid, "started": zs._start_time(child.pid)}
    return json.dumps(owner)


@dataclass
class User:
    """A cache, and what is known of it.

    Attributes
    ----------
    pending : dict of int to set of int
        Versions that it was given since it was last flushed: written already, or not yet.
    sure : set of int
        Keys among these that nobody removed from the disk meanwhile.
    marked : set of int
        Keys that it may know to be damaged: it replaces whatever is there.
    """

    cache: Cache
    pending: dict[int, set[int]] = field(default_factory=dict)
    sure: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)

    def replaces(self, k: int) -> bool:
        return k in self.marked and k in self.pending


class CacheModel(RuleBasedStateMachine):
    """Caches of one process on one directory, and processes that come and go.

    Writers run in the background, so that `disk` holds for each key all that may be there: versions, ABSENT, DAMAGED.
    A cache may also give a version that it was given, or that it opened before somebody removed it (`ever`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="zcache-model-"))
        self.path = self.folder / "cache"
        self.disk: dict[int, set[int]] = {k: {ABSENT} for k in range(N_KEYS)}
        self.ever: dict[int, set[int]] = {k: set() for k in range(N_KEYS)}
        self.users = [User(Cache(self.path, writers=1 + i)) for i in range(N_CACHES)]
        self.dropped: list[User] = []  # objects that nobody has any more; their threads may still write

    def teardown(self) -> None:
        try:
            for user in [*self.users, *self.dropped]:
                user.cache.close()
            self.sweep()
            staging = self.path / "staging"
            assert not staging.is_dir() or not list(staging.iterdir())
        finally:
            shutil.rmtree(self.folder)

    def everybody(self) -> list[User]:
        return [*self.users, *self.dropped]

    def may_be_written(self, k: int, versions: set[int]) -> None:
        """Note what takes the place of nothing, or of something damaged; what is there and whole stays."""
        if self.disk[k] & {ABSENT, DAMAGED}:
            self.disk[k] |= versions
            self.ever[k] |= versions

    def may_vanish(self, k: int, how: int) -> None:
        """Note that an entry may be gone or damaged: then whatever waits to be written may come."""
        self.disk[k] |= {how}
        for user in self.everybody():
            self.may_be_written(k, user.pending.get(k, set()))

    def is_there(self, k: int) -> None:
        """Note that an entry has been written, unless somebody is about to replace it."""
        if not any(user.replaces(k) for user in self.everybody()):
            self.disk[k].discard(ABSENT)

    # --- Callers -----------------------------------------------------------------------------------------------------

    @rule(c=caches, k=keys, version=versions, with_index=st.booleans())
    def put(self, c, k, version, with_index):
        user = self.users[c]
        user.pending.setdefault(k, set()).add(version)
        user.sure.add(k)
        if user.replaces(k):
            self.may_vanish(k, ABSENT)  # for a moment
        self.may_be_written(k, {version})
        returned = user.cache.put(key(k), item(k, version), query=(lambda _tree: query()) if with_index else None)
        assert version_of(returned, k) == version
        returned["image"][...] = 0  # the caller's to keep

    @rule(c=caches, k=keys)
    def get(self, c, k):
        found = self.users[c].cache.get(key(k), MISS)
        self.compare(c, k, None if found is MISS else version_of(found, k))

    @rule(c=caches, k=keys, seed=seeds)
    def get_region(self, c, k, seed):
        box = random_box(SHAPE, np.random.default_rng(seed))
        found = self.users[c].cache.get_region(key(k), "image", box)
        if found is None:
            self.compare(c, k, None)
            return
        part = tuple(slice(a, b) for a, b in box)
        fits = [v for v in range(N_VERSIONS) if same_bits(found, np.ascontiguousarray(image(k, v)[part]))]
        assert fits, "no version has such a region"
        if len(fits) == 1:
            self.compare(c, k, fits[0])

    @rule(c=caches, k=keys)
    def pick(self, c, k):
        """Read voxels from the index, if there is one: of the version that is read with it."""
        made = self.users[c].cache
        self.compare(c, k, made.using(key(k), lambda entry: self._pick(made, entry, k), None))

    @staticmethod
    def _pick(made: Cache, entry: Entry, k: int) -> int:
        version = version_of(made.load(entry), k)
        sets = open_sets(entry, query())
        if sets is not None:
            members = np.flatnonzero(image(k, version).reshape(-1) > 300)
            assert len(sets[0]) == len(members)
            assert [sets[0][i] for i in (0, -1)] == [members[0], members[-1]]
        return version

    @rule(c=caches, k=keys)
    def add_index(self, c, k):
        self.users[c].cache.add_index(key(k), query())

    def compare(self, c: int, k: int, found: int | None) -> None:
        """Hold what was read, None on a miss, against what may be."""
        user = self.users[c]
        if found is None:
            assert self.disk[k] & {ABSENT, DAMAGED}, f"key {k} is lost: one of {self.disk[k]} should be there"
            user.marked.add(k)
        else:
            may_be = self.ever[k] | user.pending.get(k, set())
            assert found in may_be, f"key {k} gives version {found}, not one of {may_be}"

    @rule(k=keys)
    def read_afresh(self, k):
        """What a process reads that comes new: nothing but what is on disk."""
        with Cache(self.path, read_only=True) as made:
            found = made.get(key(k), MISS)
        version = ABSENT if found is MISS else version_of(found, k)
        assert version in self.disk[k] or (found is MISS and DAMAGED in self.disk[k])
        if not any(k in user.pending for user in self.everybody()):  # so this is what is there, and stays
            self.disk[k] &= {version, DAMAGED}

    @rule(c=caches)
    def flush(self, c):
        self._flush(self.users[c])

    def _flush(self, user: User) -> None:
        user.cache.flush()
        written, user.pending = user.pending, {}
        for k in written:
            user.marked.discard(k)
            if k in user.sure:
                self.is_there(k)
        user.sure.clear()

    @rule(c=caches)
    def close(self, c):
        self._flush(self.users[c])
        self.users[c].cache.close()

    # --- Other processes, living and dead ----------------------------------------------------------------------------

    @rule(c=caches, k=keys, version=versions, ends_well=st.booleans())
    def forked_writer(self, c, k, version, ends_well):
        """A forked child goes on with a cache: it reads and writes, and ends well or is lost at once."""
        inherited = self.users[c].cache

        def write() -> None:
            watch(30)
            inherited.get(key((k + 1) % N_KEYS), MISS)
            assert version_of(inherited.put(key(k), item(k, version)), k) == version
            if ends_well:
                inherited.close()

        self.may_be_written(k, {version})
        in_fork(write)
        if ends_well:
            self.is_there(k)

    @rule(c=caches)
    def drop_a_cache(self, c):
        """A cache is dropped without a word and another takes its place."""
        self.dropped.append(self.users[c])
        self.users[c] = User(Cache(self.path, writers=1 + c))

    @rule()
    def threads_of_the_dropped_end(self):
        for user in self.dropped:
            self._flush(user)
            user.cache.close()
        self.dropped.clear()

    @rule(k=keys, version=versions, upto=st.integers(0, 4))
    def crash_of_a_process(self, k, version, upto):
        """A process died as it wrote: part of an entry in its staging, which others sweep."""
        made = self.folder / uuid.uuid4().hex  # elsewhere: a living writer may sweep at any time
        place = made / "1" / "image" / "c" / "0" / "0" / "0"
        place.mkdir(parents=True)
        if upto > 0:
            (made / "owner.json").write_text(dead_process())
        if upto > 1:
            (place / "0").write_bytes(image(k, version).tobytes()[: 1000 * upto])
        if upto > 3:
            (made / "1" / "zarr.json").write_text("{")
        (self.path / "staging").mkdir(parents=True, exist_ok=True)
        made.rename(self.path / "staging" / made.name)

    @rule()
    def sweep(self):
        """What the dead left goes: at once if it says whose it is, after a day if it does not."""
        parent = self.path / "staging"
        if not parent.is_dir():
            return
        for user in self.everybody():
            self._flush(user)  # a thread that has begun to stage, but not said so, would look like a dead one
        for folder in parent.iterdir():
            owner = folder / "owner.json"  # empty, if its process died just then
            if folder not in self._staging() and not (owner.exists() and owner.stat().st_size):
                os.utime(folder, (time.time() - 2 * DAY_S,) * 2)
        zs.sweep_staging(parent)
        assert {f for f in parent.iterdir() if f not in self._staging()} == set()

    def _staging(self) -> list[Path | None]:
        return [user.cache._store._staging for user in self.everybody()]

    # --- The disk ----------------------------------------------------------------------------------------------------

    @rule(k=keys)
    def evict(self, k):
        """Somebody removes an entry, as one should: out of sight first, then for good."""
        away = self.folder / uuid.uuid4().hex
        try:
            (self.path / "cache.zarr" / key(k)).rename(away)
        except FileNotFoundError:
            assert ABSENT in self.disk[k]
        else:
            shutil.rmtree(away)
            assert self.disk[k] != {ABSENT}
        for user in self.everybody():
            user.sure.discard(k)  # what it was given may have been written before
        self.disk[k] = set()
        self.may_vanish(k, ABSENT)

    @rule(k=keys, seed=seeds, cut=st.booleans())
    def corrupt(self, k, seed, cut):
        """A byte of an entry changes in place, or a file ends early."""
        rng = np.random.default_rng(seed)
        paths = sorted(p for p in (self.path / "cache.zarr" / key(k)).rglob("*") if p.is_file())
        if not paths:
            return
        try:
            with paths[rng.integers(len(paths))].open("r+b") as f:
                at = int(rng.integers(max(1, f.seek(0, os.SEEK_END))))
                f.seek(at)
                byte = f.read(1) or b"\0"
                f.seek(at)
                if cut:
                    f.truncate()
                else:
                    f.write(bytes([byte[0] ^ int(rng.integers(1, 256))]))
        except FileNotFoundError:
            assert any(user.replaces(k) for user in self.everybody())
        self.may_vanish(k, DAMAGED)

    @rule(k=keys, version=versions)
    def heal(self, k, version):
        """Once everybody is done: read by somebody who sees whether it is damaged, and replaced if so."""
        for user in self.everybody():
            self._flush(user)
        with Cache(self.path) as made:
            found = made.using(key(k), lambda entry: self._pick(made, entry, k), ABSENT)
            assert found in self.disk[k] or (found == ABSENT and DAMAGED in self.disk[k])
            if found == ABSENT:
                made.put(key(k), item(k, version))
                made.flush()
                found = made.using(key(k), lambda entry: self._pick(made, entry, k), ABSENT)
                assert found == version, "what was not there or damaged was not replaced"
        self.disk[k] = {found}
        self.ever[k].add(found)

    @invariant()
    def nothing_was_refused(self):
        for user in self.everybody():
            assert not user.cache.stats.skipped
            assert not user.cache.stats.read_errors


@pytest.mark.filterwarnings("ignore::zcache.errors.ZCacheWarning")
def test_a_cache_is_a_dict_that_may_forget():
    run_state_machine_as_test(
        CacheModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # threads and processes do not repeat themselves: nothing to shrink
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
