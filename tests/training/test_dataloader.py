"""Worker processes: forked, from a forkserver and spawned, persistent or not, also after the parent used the cache."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from monai.data import DataLoader, ThreadDataLoader, list_data_collate
from monai.transforms import Compose

import zcache.storage.recorder
from tests.strategies import assert_same
from tests.training.helpers import (
    Counted,
    Shift,
    ct_pipeline,
    entries,
    first_item,
    fresh_context,
    in_fresh_process,
    loading,
    python,
    random_part,
    runs,
    staged,
)
from zcache import PersistentDataset, ZCacheWarning

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_warnings"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
DATA = [{"x": float(i)} for i in range(10)]


@pytest.fixture(autouse=True)
def strict_workers(monkeypatch):
    """Make warnings of zcache errors in processes that are started afresh, too."""
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")


def context(method: str):
    return fresh_context() if method == "forkserver" else multiprocessing.get_context(method)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come, however long the machine takes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def as_it_is(batch):
    return batch


def check_epochs(ds: PersistentDataset, workers: int, method: str | None, *, persistent: bool, before: int = 0) -> None:
    """Run two epochs; then every item is in the cache, and the parent has counted what the workers did."""
    loader = DataLoader(
        ds,
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context=context(method) if workers else None,
        collate_fn=as_it_is,
        timeout=60 if workers else 0,
    )
    n = len(ds)
    for epoch in range(2):
        items = [item for batch in loader for item in batch]
        assert [float(item["x"][0]) for item in items] == [d["x"] + 1 for d in ds.data]
        if persistent or not workers:
            until(lambda: ds.stats.stored + ds.stats.already_stored == n)
        assert len(entries(ds.cache_dir)) == n
        assert ds.stats.stored + ds.stats.already_stored >= n
        if epoch == 0:
            filled = ds.stats
    stats = ds.stats
    assert filled.misses + filled.hits + filled.inflight_hits == n + before
    assert stats.misses == filled.misses
    assert stats.hits + stats.inflight_hits == filled.hits + filled.inflight_hits + n
    assert not stats.skipped
    assert (stats.damaged, stats.read_errors) == (0, 0)
    del loader
    ds.close()
    until(lambda: not staged(ds.cache_dir))


@pytest.mark.parametrize(
    ("method", "workers", "persistent"),
    [("none", 0, False), *((m, w, p) for m in ("fork", "forkserver") for w in (1, 4) for p in (False, True))],
)
def test_after_an_epoch_every_item_is_cached(method, workers, persistent, tmp_path):
    check_epochs(PersistentDataset(DATA, Shift(), tmp_path), workers, method, persistent=persistent)


def test_after_an_epoch_with_a_spawned_worker_every_item_is_cached(tmp_path):
    check_epochs(PersistentDataset(DATA[:4], Shift(), tmp_path), 1, "spawn", persistent=True)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_case_14_workers_start_after_the_parent_has_read_and_is_writing(method, tmp_path, monkeypatch):
    """Short form: the long one, with every combination, belongs to the issue on processes."""
    ds = PersistentDataset(DATA, Shift(), tmp_path)
    ds[0]
    ds.flush()
    ds[0]
    gate = threading.Event()
    original = zcache.storage.recorder.write_entry

    def write_entry(*args, **kwargs):
        if os.getpid() == parent:
            assert gate.wait(60)
        return original(*args, **kwargs)

    parent = os.getpid()
    monkeypatch.setattr(zcache.storage.recorder, "write_entry", write_entry)
    ds[1], ds[2]  # two writers are busy in the parent while it forks
    before = ds.stats.misses + ds.stats.hits
    loader = DataLoader(
        ds,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=4,
        multiprocessing_context=context(method),
        persistent_workers=True,
        timeout=60,
    )
    try:
        first_epoch = iter(loader)
        items = [next(first_epoch)]  # the workers run by now
    finally:
        gate.set()
    for epoch in (first_epoch, loader):
        items += list(epoch)
    assert [float(item["x"][0]) for item in items] == [d["x"] + 1 for d in DATA] * 2
    until(lambda: len(entries(tmp_path)) == len(DATA))
    assert ds.stats.misses + ds.stats.hits + ds.stats.inflight_hits == before + 2 * len(DATA)
    del first_epoch, epoch, loader
    ds.close()
    assert not ds.stats.skipped


def test_case_14_a_fork_while_every_lock_is_held_does_not_stop_the_child(tmp_path):
    ds = PersistentDataset(DATA, Shift(), tmp_path)
    ds[0]
    ds.flush()
    cache = ds._cache
    locks = [cache._recorder._lock, cache._store._lock, cache._recorder._pool._state.changed, cache._counters._lock]
    for lock in locks:
        lock.acquire()
    try:
        child = multiprocessing.get_context("fork").Process(target=_use, args=(ds,))
        child.start()
    finally:
        for lock in reversed(locks):
            lock.release()
    child.join(30)
    child.kill()  # if it hangs
    child.join()
    assert child.exitcode == 0
    assert len(entries(tmp_path)) == 3


def _use(ds):
    assert ds[0]["x"][0] == 1
    ds[1]
    ds.flush()
    ds[2]


def test_real_volumes_and_random_crops_in_workers(volumes, tmp_path):
    ds = PersistentDataset(volumes, Compose([*ct_pipeline(), *random_part()]), tmp_path)
    loader = DataLoader(
        ds, batch_size=2, num_workers=2, multiprocessing_context="fork", collate_fn=list_data_collate, timeout=60
    )
    for _ in range(2):
        for batch in loader:
            assert batch["image"].shape == (4, 1, 12, 12, 8)
            assert set(batch["label"].unique().tolist()) <= {0, 1, 2}
    assert (ds.stats.stored, ds.stats.misses, ds.stats.hits) == (4, 4, 4)


def test_a_thread_data_loader_works(volumes, tmp_path):
    ds = PersistentDataset(volumes, loading(), tmp_path)
    for _ in range(2):
        assert len(list(ThreadDataLoader(ds, batch_size=1, num_workers=0))) == 4
        ds.flush()
    assert (ds.stats.stored, ds.stats.hits) == (4, 4)


def test_workers_hit_what_the_parent_stored_and_the_other_way_round(tmp_path):
    log = str(tmp_path / "log")
    steps = [Counted("x", log), Shift()]
    ds = PersistentDataset(DATA, steps, tmp_path / "c")
    for i in range(5):
        ds[i]
    ds.flush()
    loader = DataLoader(
        ds, batch_size=None, collate_fn=as_it_is, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    list(loader)
    assert runs(log) == len(DATA)
    list(ds)
    assert runs(log) == len(DATA)
    assert (ds.stats.misses, ds.stats.hits) == (10, 15)


def test_an_abandoned_epoch_neither_hangs_nor_leaves_half_an_entry(tmp_path):
    ds = PersistentDataset([{"x": float(i)} for i in range(200)], Shift(size=100_000), tmp_path)
    loader = DataLoader(
        ds, batch_size=None, collate_fn=as_it_is, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for i, _item in enumerate(loader):
        if i == 10:
            break
    del loader
    ds.close()
    found = len(entries(tmp_path))
    assert found > 10
    with PersistentDataset(ds.data, Shift(size=100_000), tmp_path, on_error="raise", read_only=True) as again:
        for i in range(11):
            again[i]
        assert again.stats.damaged == 0


EXITS = """
import sys
from tests.training.helpers import Shift
from zcache import PersistentDataset
ds = PersistentDataset([{"x": float(i)} for i in range(6)], Shift(size=2_000_000), sys.argv[1], writers=1)
for i in range(6):
    ds[i]
print(len(list(__import__("pathlib").Path(sys.argv[1]).glob("cache.zarr/*/zarr.json"))) < 6 and "true" or "false")
"""


def test_the_end_of_the_interpreter_loses_nothing(tmp_path):
    pending_at_exit = python(EXITS, tmp_path)
    assert pending_at_exit in (True, False)
    assert len(entries(tmp_path)) == 6
    assert not staged(tmp_path)
    ds = PersistentDataset([{"x": 5.0}], Shift(size=2_000_000), tmp_path, on_error="raise")
    assert torch.equal(ds[0]["x"], torch.full((2_000_000,), 6.0))
    assert ds.stats.hits == 1


def test_a_fresh_process_that_does_not_flush_keeps_everything(tmp_path):
    stored = in_fresh_process(_first_without_closing, str(tmp_path))
    assert stored in (0, 1)
    assert len(entries(tmp_path)) == 1
    _, stats = first_item(DATA, [Shift()], str(tmp_path))
    assert stats.hits == 1


def _first_without_closing(cache_dir):
    ds = PersistentDataset(DATA, [Shift()], cache_dir)
    _kept.append(ds)
    ds[0]
    return ds.stats.stored


_kept = []


def _full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_case_18_a_full_disk_in_workers_does_not_stop_the_epoch(tmp_path, monkeypatch, heard):
    monkeypatch.setattr(zcache.storage.recorder, "write_entry", _full)
    ds = PersistentDataset(DATA, Shift(), tmp_path)
    loader = DataLoader(
        ds,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
        worker_init_fn=_quiet,
    )
    for _ in range(2):
        assert [float(item["x"][0]) for item in loader] == [d["x"] + 1 for d in DATA]
    assert ds.stats.skipped == {"no_space": 20}
    assert (ds.stats.misses, ds.stats.stored) == (20, 0)
    assert not entries(tmp_path)


def _quiet(_worker):
    warnings.simplefilter("ignore", ZCacheWarning)


def test_case_18_a_cache_below_a_file_in_workers_does_not_stop_the_epoch(tmp_path, heard):
    blocked = tmp_path / "file"
    ds = PersistentDataset(DATA, Shift(), blocked / "cache")
    blocked.write_text("this is in the way")
    loader = DataLoader(
        ds,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
        worker_init_fn=_quiet,
    )
    assert [float(item["x"][0]) for item in loader] == [d["x"] + 1 for d in DATA]
    assert sum(ds.stats.skipped.values()) == len(DATA)
    assert ds.stats.misses == len(DATA)


def test_a_data_set_can_be_copied_and_pickled(tmp_path):
    ds = PersistentDataset(DATA, Shift(), tmp_path)
    expected = ds[0]
    ds.flush()
    for other in (copy.deepcopy(ds), copy.copy(ds), pickle.loads(pickle.dumps(ds))):
        assert_same(expected, other[0])
        other[1]
        other.close()
    assert len(entries(tmp_path)) == 2
