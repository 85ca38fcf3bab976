"""Every system call on shared memory, made to fail in every way: the disk serves, items stay right, nothing leaks."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.stress.faults import Fault, faults_of, system_calls
from tests.stress.faults_fill import assert_closed, heard
from tests.support import key
from zcache import Cache
from zcache.storage import ledger, membership, shm

SEAMS = (ledger, membership, shm)
ERRORS = (errno.ENOSPC, errno.ENOENT, errno.EMFILE)
ITEM = {
    "image": np.random.default_rng(0).integers(-1000, 1500, (1, 12, 13, 14)).astype("f4"),
    "plain": np.random.default_rng(1).random((9, 10, 11)),
}
BOX = ((0, 1), (2, 7), (0, 13), (5, 6))


def opened(folder, budget="1MiB"):
    (folder / "memory").mkdir(exist_ok=True)
    return Cache(folder / "disk", memory=budget, memory_dir=folder / "memory")


def same(item):
    return item is not None and all(np.array_equal(item[name], ITEM[name]) for name in ITEM)


def fill(folder):
    with opened(folder) as cache:
        cache.put(key(0), ITEM)
        cache.flush()
        assert same(cache.get(key(0)))


def second_run(folder):
    with opened(folder) as cache:
        for _ in range(2):
            assert same(cache.get(key(0)))
            np.testing.assert_array_equal(cache.get_region(key(0), "image", BOX), ITEM["image"][:, 2:7, :, 5:6])
        assert cache.stats.misses == 0


def crowded(folder):
    """Two items that do not fit together, and a third that was left by another run."""
    with opened(folder, "30KiB") as cache:
        for _ in range(3):
            for i in range(2):
                cache.put(key(i), ITEM)
                cache.flush()
                assert same(cache.get(key(i)))


ACTIONS = {"fill": (fill, ()), "second run": (second_run, (fill,)), "crowded": (crowded, (fill,))}


def calls_of(action, folder):
    with system_calls(seams=SEAMS) as calls:
        action(folder)
    return calls.names


@pytest.mark.parametrize("name", ACTIONS)
def test_case_18_whatever_memory_refuses_the_disk_serves(folder, tally, name):
    action, before = ACTIONS[name]
    for prepare in before:
        prepare(folder)
    names = calls_of(action, folder)
    assert {"mkdir", "open", "stat", "fstat", "unlink"} <= set(names)
    for fault in faults_of(names, ERRORS if action is not crowded else ERRORS[:1]):
        try:
            trial(folder, action, fault, fresh=not before)
        except BaseException as e:
            e.add_note(f"{fault}, {names[fault.n - 1]}")
            raise
        tally["faults of memory"] += 1


def trial(folder: Path, action, fault: Fault, *, fresh: bool) -> None:
    if fresh:
        shutil.rmtree(folder / "disk", ignore_errors=True)
    with heard() as said, system_calls(fault, SEAMS):
        action(folder)
    assert len(said) <= 3, said  # one of each kind
    assert_closed(folder)
    second_run(folder)  # what was left behind is found and cleared up
    assert list((folder / "memory").iterdir()) == []
