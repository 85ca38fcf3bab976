"""Cases 1 to 12 and 18 of ../shared/cases.md, as far as a data set meets them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    Lambda,
    MapTransform,
    RandFlipd,
    Randomizable,
    RandShiftIntensityd,
    ScaleIntensityRanged,
    Spacingd,
    Transform,
)

import zcache.storage.recorder
import zcache.storage.store
import zcache.storage.writer
from tests.strategies import assert_same
from tests.training.helpers import (
    KEYS,
    Counted,
    ct_pipeline,
    entries,
    fresh_context,
    in_fresh_process,
    invert_and_save,
    loading,
    plain,
    runs,
    staged,
)
from zcache import FingerprintError, PersistentDataset, ZCacheWarning


def said_by_zcache(heard) -> list[str]:
    return [str(w.message) for w in heard if issubclass(w.category, ZCacheWarning)]


def test_case_01_an_edited_parameter_is_computed_anew_and_both_live_side_by_side(volumes, tmp_path):
    log = str(tmp_path / "log")

    def shape(spacing):
        steps = [*loading(), Counted("image", log), Spacingd(KEYS, (spacing,) * 3, mode=("bilinear", "nearest"))]
        with PersistentDataset(volumes[:1], steps, tmp_path / "c") as ds:
            assert_same(plain(volumes[:1], steps)[0], ds[0])
            return tuple(ds[0]["image"].shape)

    coarse, fine = shape(1.5), shape(1.0)
    assert coarse != fine
    assert len(entries(tmp_path / "c")) == 2
    before = runs(log)
    assert (shape(1.5), shape(1.0)) == (coarse, fine)
    assert runs(log) == before + 2  # by the comparison with plain MONAI alone
    assert len(entries(tmp_path / "c")) == 2


def test_case_02_parameters_that_json_cannot_express_count_by_content(volumes, tmp_path):
    seen = set()
    for i, a_min in enumerate([np.array(-57.0), np.array(-56.0), np.array(-57.0, "f4"), torch.tensor(-57.0), -57.0]):
        steps = [*loading(), ScaleIntensityRanged("image", a_min, 164.0, 0.0, 1.0, clip=True)]
        with PersistentDataset(volumes[:1], steps, tmp_path) as ds:
            assert_same(plain(volumes[:1], steps)[0], ds[0])
            seen.add(ds._entry_key(volumes[0]))
        assert len(entries(tmp_path)) == len(seen) == i + 1


class WithTable(Transform):
    def __init__(self, table):
        self.table = table

    def __call__(self, data):
        return {**data, "x": torch.full((2000,), float(self.table[-1]))}


def test_case_02_one_element_of_a_large_array_counts(tmp_path):
    for last in (1.0, 2.0):
        table = np.zeros(100_000)
        table[-1] = last
        with PersistentDataset([{"x": 0}], WithTable(table), tmp_path) as ds:
            assert ds[0]["x"][0] == last
            ds.flush()
            assert ds[0]["x"][0] == last
    assert len(entries(tmp_path)) == 2


def test_case_02_what_cannot_be_described_is_refused_and_never_hashed_by_name(tmp_path):
    with pytest.raises(FingerprintError, match="table"):
        PersistentDataset([{"x": 0}], WithTable(iter([1.0])), tmp_path)
    assert not entries(tmp_path)


def test_case_03_invert_and_save_in_a_fresh_process_gives_the_bytes_of_the_uncached_result(volumes, tmp_path):
    data = volumes[:2]
    uncached, cached, fresh = (tmp_path / name for name in ("uncached", "cached", "fresh"))
    invert_and_save(data, None, str(uncached))
    assert invert_and_save(data, str(tmp_path / "c"), str(cached)) == {"hits": 0, "misses": 2}
    assert in_fresh_process(invert_and_save, data, str(tmp_path / "c"), str(fresh)) == {"hits": 2, "misses": 0}
    files = sorted(p.name for p in uncached.iterdir())
    assert len(files) == 4
    for folder in (cached, fresh):
        assert sorted(p.name for p in folder.iterdir()) == files
        for name in files:
            assert (folder / name).read_bytes() == (uncached / name).read_bytes()


def test_case_04_the_first_access_returns_what_later_ones_do(volumes, tmp_path, gate):
    class Mixed(Transform):
        def __call__(self, data):
            image = MetaTensor(torch.arange(6000, dtype=torch.int16).reshape(1, 60, 100).transpose(1, 2))
            return {
                "image": image,
                "array": np.asfortranarray(np.arange(3000, dtype=">u2").reshape(50, 60)),
                "scalar": np.float32(2.5),
                "number": 3,
                "tuple": (torch.tensor(1.5), "x", None),
                "grad": torch.ones(2, requires_grad=True),
                "path": Path("a"),
            }

    for cached in (Mixed(), loading(), ct_pipeline(spacing=True)):
        ds = PersistentDataset(volumes[:1], cached, tmp_path)
        miss, in_flight = ds[0], ds[0]
        assert ds.stats.inflight_hits == 1
        gate.set()
        ds.flush()
        first_hit, second_hit = ds[0], ds[0]
        assert ds.stats.hits == 2
        for got in (in_flight, first_hit, second_hit):
            assert_same(miss, got)
        gate.clear()


def one_entry(cache_dir, data, steps):
    with PersistentDataset(data, steps, cache_dir) as ds:
        item = ds[0]
    (entry,) = entries(cache_dir)
    return entry, item


def _truncate(path, keep):
    with path.open("r+b") as f:
        f.truncate(keep if keep >= 0 else path.stat().st_size + keep)


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "metadata truncated": lambda e: _truncate(e / "zarr.json", 700),
    "metadata empty": lambda e: _truncate(e / "zarr.json", 0),
    "a byte of the metadata": lambda e: _flip(e / "zarr.json", 900),
    "index truncated": lambda e: _truncate(e / "image/c/0/0/0/0", -5),
    "a byte of the index": lambda e: _flip(e / "image/c/0/0/0/0", -10),
    "a chunk truncated": lambda e: _truncate(e / "image/c/0/0/0/0", 100),
    "a byte of a chunk": lambda e: _flip(e / "image/c/0/0/0/0", 200),
    "a byte of another array": lambda e: _flip(e / "labels/label/0/c/0/0/0/0", 40),
    "shard empty": lambda e: _truncate(e / "labels/label/0/c/0/0/0/0", 0),
    "shard gone": lambda e: (e / "image/c/0/0/0/0").unlink(),
    "array gone": lambda e: shutil.rmtree(e / "image"),
    "a file in its place": lambda e: (shutil.rmtree(e), e.write_text("foreign")),
    "another format": lambda e: (e / "zarr.json").write_text('{"zarr_format":3,"node_type":"group","attributes":{}}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_case_05_a_damaged_entry_is_reported_recomputed_and_replaced(damage, volumes, tmp_path, heard):
    data, steps = volumes[:1], loading()
    entry, expected = one_entry(tmp_path, data, steps)
    DAMAGE[damage](entry)
    with PersistentDataset(data, steps, tmp_path) as ds:
        assert_same(expected, ds[0])
        ds.flush()
        assert ds.stats.damaged + ds.stats.read_errors == 1
        assert (ds.stats.misses, ds.stats.stored) == (1, 1)
        assert_same(expected, ds[0])
        assert ds.stats.hits == 1
    (said,) = said_by_zcache(heard)
    assert entry.name in said
    with PersistentDataset(data, steps, tmp_path, on_error="raise", read_only=True) as ds:
        assert_same(expected, ds[0])
        assert ds.stats.damaged == 0
    assert entries(tmp_path) == [entry]
    assert not staged(tmp_path)


def test_case_05_an_entry_without_metadata_is_a_plain_miss_and_is_healed(volumes, tmp_path):
    entry, expected = one_entry(tmp_path, volumes[:1], loading())
    (entry / "zarr.json").unlink()
    for _ in range(3):
        with PersistentDataset(volumes[:1], loading(), tmp_path) as ds:
            assert_same(expected, ds[0])
    assert ds.stats.hits == 1


def _killed_while_writing(data, cache_dir, reached, where):
    """Stop for good in the middle of writing an entry, having said so."""

    def stop(*args, **kwargs):
        Path(reached).write_text("here")
        time.sleep(600)

    if where == "shard":
        zcache.storage.writer.ShardIndex.from_lengths = stop
    elif where == "document":
        zcache.storage.writer.entry_document = stop
    else:
        zcache.storage.store.Store.publish = stop
    ds = PersistentDataset(data, loading(), cache_dir)
    ds[0]
    ds.flush()


@pytest.mark.parametrize("where", ["shard", "document", "publish"])
def test_case_05_a_killed_writer_leaves_no_partial_entry_and_its_staging_is_swept(where, volumes, tmp_path):
    reached = tmp_path / "reached"
    writer = fresh_context().Process(
        target=_killed_while_writing, args=(volumes, str(tmp_path / "c"), str(reached), where)
    )
    writer.start()
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert writer.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(staged(tmp_path / "c")) == 1
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    assert not entries(tmp_path / "c")
    with PersistentDataset(volumes, loading(), tmp_path / "c", on_error="raise") as ds:
        assert_same(plain(volumes[:1], loading())[0], ds[0])
        ds.flush()
        assert ds.stats.stored == 1
    assert not staged(tmp_path / "c")


def test_case_06_a_label_that_is_all_zero_is_valid_and_a_lost_chunk_is_not(volumes, tmp_path, heard):
    class Blank(Transform):
        def __call__(self, data):
            return {"image": data["image"], "label": torch.zeros_like(data["label"])}

    entry, expected = one_entry(tmp_path, volumes[:1], [*loading(), Blank()])
    with PersistentDataset(volumes[:1], [*loading(), Blank()], tmp_path, on_error="raise") as ds:
        assert_same(expected, ds[0])
    shard = entry / "image/c/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    shard.write_bytes(data)
    with PersistentDataset(volumes[:1], [*loading(), Blank()], tmp_path) as ds:
        assert_same(expected, ds[0])
        assert ds.stats.damaged == 1
    assert len(said_by_zcache(heard)) == 1


def test_case_08_changes_to_the_returned_item_do_not_reach_the_store(volumes, tmp_path, gate):
    random = [RandFlipd(KEYS, prob=1.0, spatial_axis=0), RandShiftIntensityd("image", offsets=(5, 6), prob=1.0)]
    expected = plain(volumes[:2], loading())
    ds = PersistentDataset(volumes[:2], Compose([*loading(), *random]), tmp_path)
    for i in range(2):
        item = ds[i]
        item["image"] *= 0
        item["label"].fill_(9)
    for i in range(2):  # what is still pending is not shared either
        pending = ds._cachecheck(volumes[i])
        assert_same(expected[i], pending)
        pending["image"] += 1
        pending["image"].meta["filename_or_obj"] = "changed"
        pending["image"].affine[0, 0] = 99
    assert ds.stats.inflight_hits == 2
    gate.set()
    ds.flush()
    for i in range(2):
        assert_same(expected[i], ds._cachecheck(volumes[i]))
    assert ds.stats.hits == 2
    ds.close()


def test_case_08_what_a_transform_keeps_hold_of_may_change_while_the_write_waits(tmp_path, gate):
    kept = torch.zeros(4000)

    class Keeps(Transform):
        def __zcache_fingerprint__(self):
            return "keeps"

        def __call__(self, data):
            return {"x": kept, "array": kept.numpy()}

    ds = PersistentDataset([1], Keeps(), tmp_path)
    ds[0]
    kept += 7
    gate.set()
    ds.flush()
    assert_same({"x": torch.zeros(4000), "array": np.zeros(4000, "f4")}, ds[0])
    assert ds.stats.hits == 1


class ChangesInPlace(Randomizable, MapTransform):
    """A random transform that does to its input what users' transforms do."""

    def __call__(self, data):
        image = data["image"]
        image += 1
        image.meta["filename_or_obj"] = "changed"
        image.meta["new"] = [1]
        image.affine[0, 0] += 5
        image.applied_operations.append({"class": "Mine"})
        data["label"].zero_()
        data["more"] = 1
        return data


@pytest.mark.parametrize("filled_before", [True, False])
def test_case_09_values_stay_constant_over_three_epochs_of_changes_in_place(filled_before, volumes, tmp_path):
    expected = plain(volumes, ct_pipeline())
    changed = plain(volumes, Compose([*ct_pipeline(), ChangesInPlace(KEYS)]))
    steps = [*ct_pipeline(), ChangesInPlace(KEYS)]
    if filled_before:
        with PersistentDataset(volumes, steps, tmp_path) as ds:
            list(ds)
    with PersistentDataset(volumes, steps, tmp_path, on_error="raise") as ds:
        for _ in range(3):
            items = list(ds)
            assert_same(changed, items)
            assert items[0]["more"] == 1
        for item, data in zip(expected, volumes, strict=True):
            assert_same(item, ds._cachecheck(data))
        if filled_before:
            assert (ds.stats.hits, ds.stats.misses) == (16, 0)


def _start_at_once(barrier, data, cache_dir, part, queue):
    try:
        torch.set_num_threads(1)
        ds = PersistentDataset(data, [*loading(), Counted("image", f"{cache_dir}.log")], cache_dir, on_error="raise")
        barrier.wait(60)
        sums = [ds[i]["image"].double().sum().item() for i in part]
        ds.close()
        queue.put((part, sums, ds.stats.stored, ds.stats.misses))
    except BaseException as e:
        queue.put(repr(e))
        raise


@pytest.mark.timeout(120)
def test_case_11_eight_processes_start_at_once_on_a_directory_that_does_not_exist(volumes, tmp_path):
    context = fresh_context()
    cache_dir = str(tmp_path / "not" / "yet" / "there")
    (tmp_path / "not" / "yet").mkdir(parents=True)
    parts = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [2, 3]] * 2  # training and validation sets of four jobs
    barrier, queue = context.Barrier(len(parts)), context.Queue()
    jobs = [context.Process(target=_start_at_once, args=(barrier, volumes, cache_dir, part, queue)) for part in parts]
    for job in jobs:
        job.start()
    results = [queue.get(timeout=90) for _ in jobs]
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * len(jobs)
    sums_of = [item["image"].double().sum().item() for item in plain(volumes, loading())]
    for part, sums, _stored, _misses in results:
        assert sums == [sums_of[i] for i in part]
    assert sum(stored for *_, stored, _ in results) == len(volumes)  # one winner per key
    assert len(entries(cache_dir)) == len(volumes)
    assert runs(f"{cache_dir}.log") == sum(misses for *_, misses in results) <= sum(map(len, parts))
    assert not staged(cache_dir)


def test_case_12_negative_zeros_and_nans_survive_where_a_chunk_looks_like_the_fill_value(tmp_path):
    zeros = torch.zeros(1, 64, 64, 64)
    negative = -zeros
    one = zeros.clone()
    one[0, 40, 3, 3] = -0.0
    nans = torch.full((1, 64, 64, 64), 0x7FC00123, dtype=torch.int32).view(torch.float32)
    tensors = {
        "zeros": zeros,
        "negative": negative,
        "one": one,
        "nans": nans,
        "half": negative.half(),
        "b": negative.bfloat16(),
    }
    with PersistentDataset([1], Lambda(lambda _: dict(tensors)), tmp_path, hash_transform=lambda t: b"x") as ds:
        miss = ds[0]
        ds.flush()
        hit = ds[0]
        assert ds.stats.hits == 1
    for got in (miss, hit):
        assert_same(tensors, got)
        assert bool(torch.signbit(got["one"][0, 40, 3, 3]))
        assert int(torch.signbit(got["negative"]).sum()) == 64**3


@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO"])
@pytest.mark.parametrize("where", ["staging", "chunk", "rename"])
def test_case_18_what_the_file_system_refuses_does_not_stop_the_training(
    kind, where, volumes, tmp_path, monkeypatch, heard
):
    number = getattr(errno, kind)
    broken = threading.Event()
    broken.set()

    def refuse(original):
        def call(*args, **kwargs):
            if broken.is_set():
                raise OSError(number, os.strerror(number))
            return original(*args, **kwargs)

        return call

    def frames(*args):
        for k, frame in enumerate(original_frames(*args)):
            if k == 1 and broken.is_set():
                raise OSError(number, os.strerror(number))
            yield frame

    original_frames = zcache.storage.writer.frames
    if where == "chunk":
        monkeypatch.setattr(zcache.storage.writer, "frames", frames)
    elif where == "staging":
        monkeypatch.setattr(
            zcache.storage.store.Store, "_make_staging", refuse(zcache.storage.store.Store._make_staging)
        )
    else:
        monkeypatch.setattr(zcache.storage.store.Store, "publish", refuse(zcache.storage.store.Store.publish))
    expected = plain(volumes, loading())
    with PersistentDataset(volumes, loading(), tmp_path, chunks=(16, 16, 16)) as ds:
        for _ in range(2):
            assert_same(expected, list(ds))
        ds.flush()
        assert not entries(tmp_path)
        reason = {
            "ENOSPC": "no_space",
            "EDQUOT": "no_space",
            "EROFS": "read_only",
            "EACCES": "permission",
            "EIO": "io_error",
        }
        assert set(ds.stats.skipped) == {reason[kind]}
        assert ds.stats.stored == 0
        broken.clear()  # space again: caching goes on by itself
        assert_same(expected, list(ds))
    assert len(entries(tmp_path)) == len(volumes)
    assert not staged(tmp_path)
    (said,) = said_by_zcache(heard)
    assert os.strerror(number) in said
    assert str(tmp_path) in said


def test_case_18_a_directory_that_vanishes_does_not_stop_the_training(volumes, tmp_path):
    expected = plain(volumes, loading())
    with PersistentDataset(volumes, loading(), tmp_path / "c") as ds:
        assert_same(expected, list(ds))
        ds.flush()
        shutil.rmtree(tmp_path / "c")
        assert_same(expected, list(ds))
    assert (ds.stats.misses, ds.stats.stored) == (8, 8)
    assert len(entries(tmp_path / "c")) == 4


def test_case_38_tensors_with_grad_in_an_item_come_back_detached(tmp_path):
    class Learns(Transform):
        def __call__(self, data):
            weight = torch.ones(3000, requires_grad=True)
            return {"weight": weight, "image": MetaTensor(weight * data["x"])}

    with PersistentDataset([{"x": 3}], Learns(), tmp_path, on_error="raise") as ds:
        miss = ds[0]
        ds.flush()
        hit = ds[0]
        assert ds.stats.hits == 1
    for got in (miss, hit):
        assert_same({"weight": torch.ones(3000), "image": MetaTensor(torch.full((3000,), 3.0))}, got)
        assert not any(t.requires_grad for t in got.values())
