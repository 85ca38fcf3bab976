"""The index of voxels against the lists that MONAI makes; when it is built, and what reading it costs."""

from __future__ import annotations

import multiprocessing
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from monai.data import DataLoader, MetaTensor, list_data_collate
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureTyped,
    Invertd,
    Orientationd,
    RandCropByLabelClassesd,
    RandCropByPosNegLabeld,
    RandSpatialCropd,
    map_binary_to_indices,
    map_classes_to_indices,
)

from tests.strategies import assert_same
from tests.support import key
from tests.training.test_crop import drawn, make_item, on_and_off
from zcache import PersistentDataset
from zcache.cache import Cache
from zcache.encoding.payload import encode_item
from zcache.storage import files, recorder
from zcache.storage.voxels import open_sets
from zcache.training.leaves import torch_leaf_codecs
from zcache.training.select import voxel_query

KEYS = ["image", "label"]


def labelled(seed=1):
    """An item with foreground: two classes of it."""
    item = make_item((20, 24, 28), 1, torch.float32, seed)
    item["label"][:, 4:9, 5:12, 6:20] = 1
    item["label"][:, 6:8, 6:8, 6:8] = 2
    return item


def pos_neg(**kwargs):
    return RandCropByPosNegLabeld(KEYS, "label", (6, 6, 6), num_samples=3, **kwargs)


def by_class(**kwargs):
    return RandCropByLabelClassesd(KEYS, "label", (6, 6, 6), num_samples=3, warn=False, **kwargs)


def indexed(cache, item, crop):
    """Return the sets that an entry of an item holds for a crop, once the item is written."""
    cache.put(key(1), item, query=lambda tree: voxel_query(crop, tree))
    cache.flush()
    query = voxel_query(crop, encode_item(item, torch_leaf_codecs()).tree)
    return cache.using(key(1), lambda entry: open_sets(entry, query), None)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(17, 27), min_size=2, max_size=3),
    one_hot=st.integers(1, 4),
    label_dtype=st.sampled_from([torch.uint8, torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    image_dtype=st.sampled_from([None, torch.float32, torch.int16, torch.uint8, torch.float16]),
    threshold=st.sampled_from([0, 0.5, -3, 7.25]),
    classes=st.sampled_from([None, 1, 3, 5]),
    density=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_the_index_lists_what_monai_lists(
    tmp_path_factory, shape, one_hot, label_dtype, image_dtype, threshold, classes, density, seed
):
    assume(int(np.prod(shape)) * one_hot > 4096)
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 5, (one_hot, *shape)) * (rng.random((one_hot, *shape)) < density)
    item = {"label": MetaTensor(torch.as_tensor(values).to(label_dtype))}
    image_key = None
    if image_dtype is not None:
        image_key = "image"
        image = torch.as_tensor(rng.integers(0, 12, (2, *shape)))
        item["image"] = torch.cat([image] * 4).to(image_dtype)  # large enough for an array of its own
    image = item.get("image")
    with Cache(tmp_path_factory.mktemp("c"), leaf_codecs=torch_leaf_codecs(), on_error="raise") as cache:
        if classes is None:
            expected = map_binary_to_indices(item["label"], image, threshold)
            found = indexed(cache, item, pos_neg(image_key=image_key, image_threshold=threshold))
        else:
            expected = map_classes_to_indices(item["label"], classes, image, threshold)
            crop = by_class(num_classes=classes, image_key=image_key, image_threshold=threshold)
            found = indexed(cache, item, crop)
        if item["label"].nbytes <= 4096:
            assert found is None
            return
        assert cache.stats.indexed == 1
    assert [len(s) for s in found] == [len(e) for e in expected]
    for s, e in zip(found, expected, strict=True):
        places = rng.integers(0, len(e), 30) if len(e) else []
        assert [s[i] for i in places] == [int(e[i]) for i in places]


crops = {
    "image": lambda: pos_neg(image_key="image", image_threshold=20),
    "label": pos_neg,
    "classes": lambda: by_class(num_classes=3, image_key="image"),
    "classes, thinned": lambda: by_class(num_classes=3, max_samples_per_class=50),
}


@pytest.mark.parametrize("make", crops.values(), ids=crops.keys())
def test_a_label_guided_crop_is_pushed_down_from_the_first_hit_on(tmp_path, make):
    _, pushed, _ = on_and_off(tmp_path, labelled(), Compose([EnsureTyped(KEYS), make()]))
    assert pushed.indexed == 1
    assert pushed.pushed_down == pushed.hits == 2
    assert pushed.read_whole == {}


def test_an_entry_without_an_index_gets_one_on_first_use_and_stays_as_it_was(tmp_path):
    item = labelled()
    with PersistentDataset([item], [EnsureTyped(KEYS)], tmp_path) as ds:
        ds[0]
    before = {p: p.read_bytes() for p in tmp_path.glob("cache.zarr/*/**/*") if p.is_file()}
    pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image")])
    with PersistentDataset([item], pipeline, tmp_path) as ds:
        first = drawn(ds, 3, n=1)
        ds.flush()
        assert (ds.stats.pushed_down, ds.stats.indexed) == (0, 1)
        assert ds.stats.read_whole == {"no_index": 1}
        assert_same(first, drawn(ds, 3, n=1))
        assert (ds.stats.pushed_down, ds.stats.indexed, ds.stats.misses) == (1, 1, 0)
    assert before == {p: p.read_bytes() for p in before}
    with PersistentDataset([item], pipeline, tmp_path) as again:
        assert_same(first, drawn(again, 3, n=1))
        assert (again.stats.pushed_down, again.stats.indexed, again.stats.misses) == (1, 0, 0)


def test_another_threshold_has_an_index_of_its_own(tmp_path):
    item = labelled()
    for n, threshold in enumerate((0.0, 50.0, 0.0), 1):
        pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image", image_threshold=threshold)])
        _, pushed, _ = on_and_off(tmp_path, item, pipeline)
        assert pushed.pushed_down >= 1
        assert len(list(tmp_path.glob("cache.zarr/*/voxels-*"))) == min(n, 2)


def test_an_entry_that_was_replaced_does_not_keep_the_index_of_the_old_one(tmp_path):
    crop = pos_neg()
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs()) as cache:
        indexed(cache, labelled(), crop)
        (old,) = tmp_path.glob("cache.zarr/*/voxels-*")
        kept = tmp_path / "kept"
        old.rename(kept)
        cache._recorder.mark_damaged(key(1))
        other = labelled(2)
        found = indexed(cache, other, crop)
        (new,) = tmp_path.glob("cache.zarr/*/voxels-*")
        assert new.name != old.name
        kept.rename(old)  # as a client of NFS might still see it
        assert len(found[0]) == int((other["label"] > 0).sum())


def test_a_read_only_cache_is_not_added_to(tmp_path):
    item = labelled()
    with PersistentDataset([item], [EnsureTyped(KEYS)], tmp_path) as ds:
        ds[0]
    pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image")])
    with PersistentDataset([item], pipeline, tmp_path, read_only=True) as ds:
        drawn(ds, 3, n=3)
        assert ds.stats.read_whole == {"no_index": 3}
    assert not list(tmp_path.glob("cache.zarr/*/voxels-*"))


def test_an_index_that_cannot_be_made_is_tried_once_and_stops_nothing(tmp_path, heard, monkeypatch):
    item = labelled()
    tried = []

    def fails(*args):
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zcache.storage.voxels.write_child", fails)
    pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image")])
    with PersistentDataset([item], pipeline, tmp_path) as ds:
        ds[0]
        ds.flush()
        for _ in range(3):
            ds[0]
            ds.flush()
        assert (ds.stats.stored, ds.stats.not_indexed, ds.stats.hits, len(tried)) == (1, 1, 3, 1)
        assert ds.stats.skipped == {}
    assert len(heard) == 1
    assert "cannot be indexed" in str(heard[0].message)


@pytest.mark.parametrize("what", ["bits", "document"])
def test_a_damaged_index_is_damage_of_its_entry(tmp_path, heard, what):
    item = labelled()
    pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image")])
    with PersistentDataset([item], pipeline, tmp_path / "off", crop_pushdown=False) as ds:
        expected = drawn(ds, 3, n=2)
    with PersistentDataset([item], pipeline, tmp_path / "on") as ds:
        ds[0]
        ds.flush()
        (path,) = tmp_path.glob("on/cache.zarr/*/voxels-*/" + ("bits/c/0/0" if what == "bits" else "zarr.json"))
        data = bytearray(path.read_bytes())
        data[120] ^= 1
        path.write_bytes(data)
        assert_same(expected, drawn(ds, 3, n=2))
        ds.flush()
        assert (ds.stats.damaged, ds.stats.stored, ds.stats.indexed) == (1, 2, 2)
        assert_same(expected, drawn(ds, 3, n=2))
        assert ds.stats.damaged == 1
    assert len(heard) == 1


def test_case_26_a_centre_is_chosen_from_a_few_kilobytes(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    shape = (1, 160, 160, 160)
    noise = rng.random(shape) < 0.5  # bits that do not compress
    item = {"image": torch.as_tensor(noise.astype(np.uint8)), "label": torch.zeros(shape, dtype=torch.uint8)}
    item["label"][:, 40:50, 40:50, 40:50] = 1
    crop = RandCropByPosNegLabeld(KEYS, "label", (4, 4, 4), neg=0.5, num_samples=4, image_key="image")
    with PersistentDataset([item], Compose([EnsureTyped(KEYS), crop]), tmp_path) as ds:
        ds[0]
        ds.flush()
        ds[0]
        (bits,) = tmp_path.glob("cache.zarr/*/voxels-*/bits/c/0/0")
        read = {}
        pread = files.read_exactly
        monkeypatch.setattr(
            files,
            "read_exactly",
            lambda fd, a, b: read.__setitem__(fd, read.get(fd, 0) + b - a) or pread(fd, a, b),
        )
        (fd,) = [s._fd for k, (s, _) in ds._cache._entries._shards._values.items() if k[2] == "bits"]
        ds[0]
        assert ds.stats.pushed_down == 2
    assert bits.stat().st_size > 256 * 1024
    assert 0 < read[fd] < 4 * 17 * 1024


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_build_and_use_indexes(tmp_path, method):
    items = [labelled(i) for i in range(4)]
    with PersistentDataset(items, [EnsureTyped(KEYS)], tmp_path) as ds:
        for i in range(4):
            ds[i]
    pipeline = Compose([EnsureTyped(KEYS), pos_neg(image_key="image")])
    with PersistentDataset(items, pipeline, tmp_path) as ds:
        loader = DataLoader(
            ds,
            batch_size=1,
            num_workers=2,
            collate_fn=list_data_collate,
            persistent_workers=True,
            multiprocessing_context=multiprocessing.get_context(method),
        )
        for _ in range(2):
            assert sum(len(batch["label"]) for batch in loader) == 12
        assert ds.stats.indexed == 4
        assert ds.stats.read_whole == {"no_index": 4}
        assert ds.stats.pushed_down == 4


@pytest.mark.parametrize(
    "crop",
    [RandSpatialCropd(KEYS, (8, 9, 10), random_size=False), pos_neg(image_key="image", image_threshold=20)],
    ids=["spatial", "guided"],
)
def test_inverting_a_sample_gives_what_it_gives_without_push_down(tmp_path, crop):
    item = labelled()
    cached = [
        EnsureTyped(KEYS),
        CropForegroundd(KEYS, "image", select_fn=lambda x: x > -150),
        Orientationd(KEYS, "LPS", labels=None),
    ]
    pipeline = Compose([*cached, crop])
    inverse = Invertd(KEYS, pipeline, orig_keys=KEYS, nearest_interp=False, to_tensor=True)
    inverted = []
    for pushdown in (True, False):
        with PersistentDataset([item], pipeline, tmp_path, crop_pushdown=pushdown) as ds:
            ds[0]
            ds.flush()
            pipeline.set_random_state(7)
            samples = ds[0]
            assert ds.stats.pushed_down == pushdown
        inverted.append([inverse(sample) for sample in (samples if isinstance(samples, list) else [samples])])
    for on, off in zip(*inverted, strict=True):
        for k in KEYS:
            if isinstance(crop, RandSpatialCropd):  # MONAI has no inverse of the other
                assert on[k].shape == item[k].shape
            assert_same(on[k].as_tensor(), off[k].as_tensor())
            assert_same(on[k].affine, off[k].affine)
        assert bool((on["image"] != 0).any())


def test_what_monai_refuses_it_refuses_alike(tmp_path):
    item = labelled()
    errors = []
    for name, pushdown in (("on", True), ("off", False)):
        pipeline = Compose([EnsureTyped(KEYS), by_class(num_classes=None)])
        with PersistentDataset([item], pipeline, tmp_path / name, crop_pushdown=pushdown) as ds:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="applying transform") as caught:
                    ds[0]
                ds.flush()
                errors.append((type(caught.value.__cause__), str(caught.value.__cause__)))
    assert len(set(errors)) == 1
    assert errors[0][0] is ValueError


def test_an_entry_that_is_evicted_before_it_is_indexed_is_no_trouble(tmp_path, monkeypatch, heard):
    real = recorder.write_entry

    def evicted(store, key, *args, **kwargs):
        written = real(store, key, *args, **kwargs)
        shutil.rmtree(store.entry_path(key))
        return written

    monkeypatch.setattr(recorder, "write_entry", evicted)
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs(), on_error="raise") as cache:
        assert indexed(cache, labelled(), pos_neg()) is None
        assert (cache.stats.stored, cache.stats.indexed, cache.stats.not_indexed) == (1, 0, 0)
    monkeypatch.undo()
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs(), on_error="raise") as cache:
        assert len(indexed(cache, labelled(), pos_neg())) == 2
    assert not heard
