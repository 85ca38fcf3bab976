"""Contract 1 on real pipelines, precision, and what a data set adds to MONAI's."""

from __future__ import annotations

import enum
import errno
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose, EnsureChannelFirst, Lambda, Lambdad, LoadImage, Transform
from monai.utils import TraceKeys, set_determinism

import zcache
import zcache.storage.recorder
from tests.strategies import assert_same
from tests.training.helpers import (
    Shift,
    bytes_under,
    ct_pipeline,
    entries,
    first_item,
    in_fresh_process,
    loading,
    plain,
    random_part,
    sampling_part,
    staged,
    stored_arrays,
    without_ids,
)
from zcache import (
    CacheConfigError,
    CacheNTransDataset,
    CacheWriteError,
    PersistentDataset,
    UnstorableError,
    ZCacheWarning,
)

PIPELINES = {
    "windowed": ct_pipeline(),
    "spaced": ct_pipeline(spacing=True),
    "loaded": loading(),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("track_meta", [True, False])
def test_a_hit_is_a_miss(name, track_meta, volumes, tmp_path, gate):
    steps = PIPELINES[name]
    expected = plain(volumes[:1], steps)[0]
    if not track_meta:
        expected = {k: v.as_tensor() if isinstance(v, MetaTensor) else v for k, v in expected.items()}
    with PersistentDataset(volumes, steps, tmp_path, track_meta=track_meta, on_error="raise") as ds:
        miss, in_flight = ds[0], ds[0]
        assert ds.stats.inflight_hits == 1
        assert not entries(tmp_path)
        gate.set()
        ds.flush()
        hit = ds[0]
        assert (ds.stats.misses, ds.stats.hits, ds.stats.stored) == (1, 1, 1)
    fresh, stats = in_fresh_process(first_item, volumes, steps, str(tmp_path)) if track_meta else (hit, None)
    assert stats is None or (stats.hits, stats.misses) == (1, 0)
    for got in (miss, in_flight, hit, fresh):
        assert_same(expected, got)
        assert all(t.is_contiguous() for t in got.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("tail", [random_part, sampling_part])
@pytest.mark.parametrize("name", ["windowed", "spaced"])
def test_random_transforms_draw_the_same_with_and_without_the_cache(name, tail, volumes, tmp_path):
    def two_epochs(data_set, **kwargs):
        set_determinism(7)
        try:
            pipeline = Compose([*PIPELINES[name], *tail()]).set_random_state(seed=3)
            ds = data_set(volumes, pipeline, **kwargs)
            return ds, [without_ids(ds[i]) for _ in range(2) for i in range(len(volumes))]
        finally:
            set_determinism(None)

    _, without = two_epochs(Dataset)
    ds, filling = two_epochs(PersistentDataset, cache_dir=tmp_path)
    ds.close()
    ds, reading = two_epochs(PersistentDataset, cache_dir=tmp_path, read_only=True)
    assert (ds.stats.hits, ds.stats.misses) == (2 * len(volumes), 0)
    # If two items of one seed were equal, this test would show nothing.
    assert not torch.equal(without[0][0]["image"], without[len(volumes)][0]["image"])
    for a, b, c in zip(without, filling, reading, strict=True):
        assert_same(a, b)
        assert_same(a, c)


def test_the_trace_of_a_hit_can_be_inverted(volumes, tmp_path):
    pipeline = Compose(ct_pipeline(spacing=True))
    with PersistentDataset(volumes, pipeline, tmp_path, on_error="raise") as ds:
        ds[0]
        ds.flush()
        hit = ds[0]
        assert ds.stats.hits == 1
    expected = Compose(ct_pipeline(spacing=True)).inverse(plain(volumes[:1], pipeline)[0])
    assert_same(expected, Compose(ct_pipeline(spacing=True)).inverse(hit))


def test_ids_of_transforms_are_kept_when_asked(volumes, tmp_path):
    pipeline = Compose(ct_pipeline())
    with PersistentDataset(volumes, pipeline, tmp_path, reset_ops_id=False) as ds:
        ds[0]
        ds.flush()
        kept = {op[TraceKeys.ID] for op in ds[0]["image"].applied_operations}
    with PersistentDataset(volumes, pipeline, tmp_path) as ds:
        ds[0]
        ds.flush()
        reset = {op[TraceKeys.ID] for op in ds[0]["image"].applied_operations}
    assert TraceKeys.NONE not in kept
    assert reset == {TraceKeys.NONE}
    assert len(entries(tmp_path)) == 2


class ListOf(Transform):
    """Return several items for one, as MONAI's grid patches do."""

    def __init__(self, n):
        self.n = n

    def __call__(self, data):
        return [{**data, "part": i, "x": torch.full((2000,), float(i))} for i in range(self.n)]


def test_a_deterministic_transform_may_return_a_list(tmp_path):
    steps = [ListOf(3), Lambdad("x", lambda x: x + 1)]
    data = [{"id": "a"}, {"id": "b"}]
    expected = plain(data, steps)
    with PersistentDataset(data, steps, tmp_path, on_error="raise") as ds:
        misses = [ds[i] for i in range(2)]
        ds.flush()
        hits = [ds[i] for i in range(2)]
        assert ds.stats.hits == 2
    assert isinstance(hits[0], list)
    assert_same(expected, misses)
    assert_same(expected, hits)


@pytest.mark.parametrize("kind", [str, Path])
def test_items_may_be_paths(kind, volumes, tmp_path):
    data = [kind(v["image"]) for v in volumes]
    steps = [LoadImage(), EnsureChannelFirst()]
    with PersistentDataset(data, steps, tmp_path, on_error="raise") as ds:
        misses = list(ds)
        ds.flush()
        hits = list(ds)
        assert ds.stats.hits == len(data)
    for path, miss, hit in zip(data, misses, hits, strict=True):
        assert_same(plain([path], steps)[0], miss)
        assert_same(miss, hit)


def test_items_may_be_numbers_tuples_and_arrays(tmp_path):
    data = [3, (1, "b"), np.arange(5000.0), torch.arange(9000), [1, [2]], None]
    with PersistentDataset(data, Lambda(lambda x: [x, x]), tmp_path, on_error="raise") as ds:
        misses = list(ds)
        ds.flush()
        assert_same(misses, list(ds))
        assert_same(plain(data, Lambda(lambda x: [x, x])), misses)
        assert ds.stats.hits == len(data)


def test_numpy_arrays_stay_numpy_arrays(tmp_path):
    data = [{"x": np.arange(9000, dtype=">i2").reshape(90, 100), "y": np.float32(2)}]
    with PersistentDataset(data, Lambda(lambda d: d), tmp_path) as ds:
        ds[0]
        ds.flush()
        assert_same(data[0], ds[0])


@pytest.mark.parametrize(
    ("precision", "worst"), [(1e-4, 1e-4), (0.01, 0.01), ("float16", 0.0005), ("uint16", 1 / 65535), ("uint8", 1 / 255)]
)
def test_precision_bounds_the_error_of_images_and_leaves_labels_alone(precision, worst, volumes, tmp_path):
    steps = ct_pipeline(spacing=True)
    with PersistentDataset(volumes, steps, tmp_path, precision=precision, on_error="raise") as ds:
        ds[0]
        ds.flush()
        hit = ds[0]
        assert ds.stats.hits == 1
    exact = plain(volumes[:1], steps)[0]
    assert_same(exact["label"], hit["label"])
    assert_same(exact["image"].meta, hit["image"].meta)
    assert_same(exact["image"].applied_operations, hit["image"].applied_operations)
    error = (exact["image"].double() - hit["image"].double()).abs().max().item()
    assert 0 < error <= worst
    assert hit["image"].dtype is exact["image"].dtype


def test_precision_is_part_of_the_key(volumes, tmp_path):
    steps = ct_pipeline(spacing=True)
    for precision in ("lossless", 1e-4, 1e-3, "float16", "uint8", "uint16"):
        with PersistentDataset(volumes[:1], steps, tmp_path, precision=precision) as ds:
            ds[0]
            ds.flush()
            ds[0]
            assert (ds.stats.misses, ds.stats.hits) == (1, 1)
    assert len(entries(tmp_path)) == 6


def test_precision_makes_entries_smaller(volumes, tmp_path):
    steps = ct_pipeline(spacing=True)
    sizes = {}
    for precision in ("lossless", "uint16", "uint8"):
        with PersistentDataset(volumes[:1], steps, tmp_path / precision, precision=precision) as ds:
            ds[0]
        sizes[precision] = bytes_under(tmp_path / precision / "cache.zarr")
    assert sizes["uint8"] < sizes["uint16"] < sizes["lossless"]


def test_where_an_image_stays_floating_point_one_message_says_what_precision_saves(volumes, tmp_path, caplog):
    steps = [Lambda(lambda n: {"image": torch.rand(1, 64, 65, 66, generator=torch.Generator().manual_seed(n))})]
    with caplog.at_level(logging.INFO, "zcache"), PersistentDataset([1, 2, 3], steps, tmp_path, writers=1) as ds:
        list(ds)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("zcache")]
    assert len(said) == 1
    assert "precision" in said[0]
    assert "image" in said[0]


def test_an_item_that_cannot_be_stored_is_returned_with_one_warning(tmp_path, heard):
    class Handle:
        pass

    steps = [Lambda(lambda i: {"image": torch.full((3000,), i), "meta": {"handle": Handle()}})]
    with PersistentDataset([1, 2, 3], steps, tmp_path) as ds:
        for _ in range(2):
            assert [int(item["image"][0]) for item in ds] == [1, 2, 3]
        ds.flush()
        assert ds.stats.skipped == {"unstorable": 6}
        assert (ds.stats.stored, ds.stats.hits, ds.stats.misses) == (0, 0, 6)
    said = [str(w.message) for w in heard if issubclass(w.category, ZCacheWarning)]
    assert len(said) == 1
    assert "['meta']['handle']" in said[0]
    assert "Handle" in said[0]
    assert not entries(tmp_path)
    assert not staged(tmp_path)


def test_an_item_that_cannot_be_stored_raises_when_asked(tmp_path):
    with (
        PersistentDataset([1], Lambda(lambda i: {"a": object()}), tmp_path, on_error="raise") as ds,
        pytest.raises(UnstorableError, match=r"\['a'\] is a builtins.object"),
    ):
        ds[0]


def _local_enum():
    return enum.Enum("Local", "A B").A


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
@pytest.mark.parametrize(
    "make",
    [_local_enum, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda: torch.eye(2).to_sparse()],
    ids=["an enum that no module has", "nested tensor", "sparse tensor"],
)
def test_whatever_a_leaf_is_the_item_is_returned(make, tmp_path, heard):
    leaf = make()

    class Put(Transform):
        def __call__(self, data):
            return {"leaf": leaf}

    with PersistentDataset([1], Put(), tmp_path, hash_transform=lambda _: b"put") as ds:
        assert ds[0]["leaf"] is leaf
        assert sum(ds.stats.skipped.values()) == 1
    assert sum(issubclass(w.category, ZCacheWarning) for w in heard) == 1


def test_an_item_that_has_no_key_is_computed_every_time_with_one_warning(tmp_path, heard):
    class Opaque:
        def __init__(self):
            self.file = Path(__file__).open()  # noqa: SIM115

        def __deepcopy__(self, memo):
            return self

    item = Opaque()
    with PersistentDataset([item, 5], Lambda(lambda d: {"a": 1}), tmp_path) as ds:
        assert [ds[0], ds[0], ds[1]] == [{"a": 1}] * 3
        ds.flush()
        assert ds.stats.skipped == {"unkeyable": 2}
        assert ds.stats.stored == 1
    item.file.close()
    said = [str(w.message) for w in heard if issubclass(w.category, ZCacheWarning)]
    assert len(said) == 1
    assert "hash_func" in said[0]


def test_read_only_reads_and_never_writes(volumes, tmp_path):
    steps = loading()
    with PersistentDataset(volumes[:1], steps, tmp_path) as ds:
        expected = ds[0]
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    with PersistentDataset(volumes[:2], steps, tmp_path, read_only=True) as ds:
        assert_same(expected, ds[0])
        ds[1]
        ds.flush()
        assert (ds.stats.hits, ds.stats.misses, ds.stats.stored) == (1, 1, 0)
        assert ds.stats.skipped == {"read_only": 1}
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_a_closed_data_set_may_be_used_again(tmp_path):
    ds = PersistentDataset([{"x": i} for i in range(4)], Shift(), tmp_path)
    with ds:
        ds[0]
    ds[1]
    ds.close()
    ds.close()
    assert len(entries(tmp_path)) == 2
    assert not staged(tmp_path)


def test_the_entry_says_what_it_came_from(volumes, tmp_path):
    with PersistentDataset(volumes[:1], ct_pipeline(), tmp_path) as ds:
        ds[0]
    (entry,) = entries(tmp_path)
    about = json.loads((entry / "zarr.json").read_text())["attributes"]["zcache"]
    assert about["source"] == [volumes[0]["image"], volumes[0]["label"]]
    steps = [step["transform"] for step in about["pipeline"]]
    assert steps == ["LoadImaged", "EnsureChannelFirstd", "ScaleIntensityRanged", "CropForegroundd", "Orientationd"]


def test_names_that_no_encoding_has_are_stored(tmp_path):
    data = [{"path": "/data/\udcff\u0000ü.nii", "x": 1.0}]
    with PersistentDataset(data, Shift(), tmp_path, on_error="raise") as ds:
        miss = ds[0]
        ds.flush()
        assert_same(miss, ds[0])
        assert ds.stats.hits == 1
    assert_same({**data[0], "x": torch.full((5000,), 2.0)}, miss)


def test_stats_read_as_text_and_add_up(volumes, tmp_path):
    with PersistentDataset(volumes, loading(), tmp_path) as ds:
        list(ds)
        ds.flush()
        list(ds)
        stats = ds.stats
    assert (stats.misses, stats.stored, stats.hits + stats.inflight_hits) == (4, 4, 4)
    voxels = sum(40 * (36 + i) * 30 for i in range(4))
    assert stats.raw_bytes == voxels * 4 * 2
    assert stats.stored_bytes == sum(bytes_under(e) for e in entries(tmp_path))
    assert "4 hits" in str(stats)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"codec": "gzip"}, "lz4"),
        ({"clevel": 11}, "0 to 9"),
        ({"chunks": "large"}, "chunks"),
        ({"precision": "int4"}, "precision"),
        ({"precision": -1.0}, "precision"),
        ({"writers": 0}, "writers"),
        ({"max_pending_bytes": "many"}, "bytes"),
        ({"on_error": "ignore"}, "on_error"),
    ],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused_at_once(wrong, says, tmp_path):
    with pytest.raises(CacheConfigError, match=says):
        PersistentDataset([1], Lambda(str), tmp_path, **wrong)


def test_a_transform_without_a_stable_key_is_refused_at_once_by_name(tmp_path):
    class Locked(Transform):
        def __init__(self):
            self.guard = threading.Lock()

        def __call__(self, data):
            return data

    with pytest.raises(zcache.FingerprintError, match="guard") as e:
        PersistentDataset([1], Locked(), tmp_path)
    assert "Locked" in str(e.value)
    assert "uncached" in str(e.value)
    assert not tmp_path.joinpath("cache.zarr").exists()


@pytest.mark.parametrize("codec", ["lz4", "lz4hc", "zstd", "zlib", "blosclz"])
def test_every_codec_and_explicit_chunks_work(codec, volumes, tmp_path):
    with PersistentDataset(volumes[:1], loading(), tmp_path, codec=codec, clevel=1, chunks=(16, 16, 16)) as ds:
        miss = ds[0]
        ds.flush()
        assert_same(miss, ds[0])
    (image,) = (a for name, a in stored_arrays(tmp_path).items() if name.endswith("image"))
    assert image.chunks == (1, 16, 16, 16)


def test_a_pipeline_may_be_exchanged(tmp_path):
    ds = PersistentDataset([{"x": 1}], Shift(1.0), tmp_path)
    assert ds[0]["x"][0] == 2
    ds.transform = Compose([Shift(5.0)])
    assert ds[0]["x"][0] == 6
    ds.close()
    assert len(entries(tmp_path)) == 2


def test_back_pressure_is_counted_and_nothing_is_lost(tmp_path, gate):
    data = [{"x": i} for i in range(3)]
    with PersistentDataset(data, Shift(size=5000), tmp_path, writers=1, max_pending_bytes=45_000) as ds:
        ds[0], ds[1]  # 20,000 bytes each
        third = threading.Thread(target=lambda: ds[2], daemon=True)
        third.start()
        assert gate.begun.acquire(timeout=60)
        third.join(0.3)
        assert third.is_alive()  # held back until there is room
        gate.set()
        third.join(60)
        ds.flush()
        assert ds.stats.stored == 3
        assert ds.stats.wait_s > 0


def test_on_error_raise_raises_what_a_writer_met(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zcache.storage.recorder, "write_entry", full)
    ds = PersistentDataset([{"x": 1}], Shift(), tmp_path, on_error="raise")
    ds[0]
    with pytest.raises(CacheWriteError, match="the disk or the quota is full"):
        ds.flush()
    ds.close()


def test_threads_may_share_a_data_set(volumes, tmp_path):
    with PersistentDataset(volumes, loading(), tmp_path, on_error="raise") as ds, ThreadPoolExecutor(8) as pool:
        expected = plain(volumes, loading())
        for _ in range(3):
            for i, got in enumerate(pool.map(ds.__getitem__, [0, 1, 2, 3] * 4)):
                assert_same(expected[i % 4], got)
    assert len(entries(tmp_path)) == 4


def test_cache_n_trans_beyond_the_pipeline_is_refused(tmp_path):
    with pytest.raises(CacheConfigError, match="0 to 1"):
        CacheNTransDataset([1], [Lambda(str)], 2, tmp_path)
    with pytest.raises(CacheConfigError, match="0 to 1"):
        CacheNTransDataset([1], [Lambda(str)], -1, tmp_path)
