"""Push-down on against push-down off: the same samples, traces and following random draws."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor, set_track_meta
from monai.transforms import (
    Compose,
    EnsureTyped,
    Identity,
    Identityd,
    OneOf,
    RandCropByLabelClasses,
    RandCropByLabelClassesd,
    RandCropByPosNegLabel,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandScaleCrop,
    RandScaleCropd,
    RandSpatialCrop,
    RandSpatialCropd,
    RandSpatialCropSamples,
    RandSpatialCropSamplesd,
    RandWeightedCropd,
)

from tests.strategies import assert_same
from zcache import CacheNTransDataset, PersistentDataset
from zcache.errors import EntryDamagedError
from zcache.storage import files, reader
from zcache.training.crop import WholeItem, find_crop

KEYS = ["image", "label"]

# MONAI says so of labels without foreground or background.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Num foregrounds"),
    pytest.mark.filterwarnings("ignore:no available indices"),
]


def without_ids(value):
    """MONAI's trace holds ids of objects that it makes anew in each call."""
    if isinstance(value, MetaTensor):
        value.applied_operations = without_ids(value.applied_operations)
        return value
    if isinstance(value, dict):
        return {k: (0 if k == "id" else without_ids(v)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_ids(v) for v in value)
    return value


def make_item(shape, channels, dtype, seed, classes=3):
    rng = np.random.default_rng(seed)
    image = torch.as_tensor(rng.normal(0, 100, (channels, *shape))).to(dtype)
    blob = np.zeros(shape, np.uint8)
    blob[tuple(slice(n // 4, n // 2 + 1) for n in shape)] = rng.integers(0, classes)
    affine = torch.diag(torch.as_tensor([*rng.uniform(0.5, 3, 3), 1.0]))
    return {
        "image": MetaTensor(image, affine=affine, meta={"filename_or_obj": "a.nii.gz"}),
        "label": MetaTensor(torch.as_tensor(blob)[None], affine=affine),
        "id": "P1",
        "spacing": np.arange(3.0),
    }


def drawn(dataset, seed, n=2):
    dataset.transform.set_random_state(seed)
    try:
        samples = without_ids([dataset[0] for _ in range(n)])
    except RuntimeError as e:  # what MONAI refuses, such as a label without any place to crop, it refuses alike
        samples = [str(e.__cause__)]
    holders = [t for t in dataset.transform.transforms if hasattr(t, "R")]
    return samples, [t.R.random() for t in holders]


def on_and_off(tmp_path, item, transforms, seed=3, **kwargs):
    """Return what the same pipeline gives with and without push-down, from the same entry."""
    results = []
    stats = []
    for pushdown in (True, False):
        with PersistentDataset([copy.deepcopy(item)], transforms, tmp_path, crop_pushdown=pushdown, **kwargs) as ds:
            drawn(ds, seed, n=1)
            ds.flush()
            results.append(drawn(ds, seed))
            stats.append(ds.stats)
    assert_same(*results)
    return results[0][0], *stats


crops = st.sampled_from(
    [
        lambda roi, _n: RandSpatialCropd(KEYS, roi, random_size=False),
        lambda roi, _n: RandSpatialCropd(KEYS, roi, random_size=True),
        lambda roi, _n: RandSpatialCropd(KEYS, roi, random_center=False, random_size=False),
        lambda roi, n: RandSpatialCropSamplesd(KEYS, roi, n, random_size=False),
        lambda roi, n: RandSpatialCropSamplesd(KEYS, roi, n, random_size=True),
        lambda roi, _n: RandScaleCropd(KEYS, 0.4, random_size=False),
        lambda roi, _n: RandScaleCropd(KEYS, 0.3, max_roi_scale=0.9, random_size=True),
        lambda roi, n: RandCropByPosNegLabeld(KEYS, "label", roi, num_samples=n, allow_smaller=True),
        lambda roi, n: RandCropByPosNegLabeld(
            KEYS, "label", roi, pos=2, neg=1, num_samples=n, image_key="image", image_threshold=20, allow_smaller=True
        ),
        lambda roi, n: RandCropByLabelClassesd(
            KEYS, "label", roi, num_classes=4, num_samples=n, allow_smaller=True, warn=False
        ),
        lambda roi, n: RandCropByLabelClassesd(
            ["image"],
            "label",
            roi,
            ratios=[1, 2, 0, 1],
            num_classes=4,
            num_samples=n,
            image_key="image",
            max_samples_per_class=9,
            allow_smaller=True,
            warn=False,
        ),
        lambda roi, n: RandWeightedCropd(KEYS, "label", roi, n),
        lambda roi, _n: RandSpatialCropd(["label"], roi, random_size=False),
    ]
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    make=crops,
    shape=st.lists(st.integers(18, 34), min_size=2, max_size=3),
    roi=st.integers(3, 17),
    samples=st.integers(1, 3),
    channels=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.int16, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    track_meta=st.booleans(),
)
def test_push_down_changes_nothing(tmp_path_factory, make, shape, roi, samples, channels, dtype, seed, track_meta):
    item = make_item(shape, channels, dtype, seed)
    transforms = Compose([EnsureTyped(KEYS, dtype=None), make((roi,) * len(shape), samples), RandFlipd(KEYS, 0.5, 0)])
    on_and_off(tmp_path_factory.mktemp("c"), item, transforms, seed, track_meta=track_meta)


@pytest.mark.parametrize("empty", [0, 1], ids=["empty foreground", "foreground everywhere"])
def test_labels_of_one_class(tmp_path, empty):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    item["label"][:] = empty
    transforms = Compose([EnsureTyped(KEYS), RandCropByPosNegLabeld(KEYS, "label", (8, 8, 8), num_samples=3)])
    on_and_off(tmp_path, item, transforms)


def test_one_hot_labels(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    label = item["label"].as_tensor()
    item["label"] = MetaTensor(torch.cat([label == c for c in range(3)]).to(torch.uint8))
    for crop in (
        RandCropByPosNegLabeld(KEYS, "label", (8, 8, 8), num_samples=3),
        RandCropByLabelClassesd(KEYS, "label", (8, 8, 8), num_samples=3, warn=False),
    ):
        on_and_off(tmp_path, item, Compose([EnsureTyped(KEYS), crop]))


def test_indices_that_the_item_holds_are_used(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    item |= {"fg": np.arange(500, 9000, 7), "bg": np.arange(3)}
    crop = RandCropByPosNegLabeld(KEYS, "label", (8, 8, 8), num_samples=3, fg_indices_key="fg", bg_indices_key="bg")
    samples, *_ = on_and_off(tmp_path, item, Compose([EnsureTyped(KEYS), crop]))
    assert "fg" not in samples[0][0]


@pytest.mark.parametrize(
    "crop",
    [
        RandSpatialCrop((8, 9, 10), random_size=False),
        RandSpatialCropSamples((8, 9, 10), 3, random_size=False),
        RandScaleCrop(0.5, random_size=False),
        RandCropByPosNegLabel((8, 8, 8), label=torch.ones(1, 20, 24, 28), num_samples=2, pos=1, neg=0),
        RandCropByLabelClasses((8, 8, 8), label=torch.ones(1, 20, 24, 28), num_classes=2, num_samples=2, ratios=[0, 1]),
    ],
    ids=lambda crop: type(crop).__name__,
)
def test_array_versions(tmp_path, crop):
    item = make_item((20, 24, 28), 2, torch.float32, 1)["image"]
    results, pushed, _ = on_and_off(tmp_path, item, Compose([Identity(), crop]))
    assert pushed.pushed_down >= 2
    assert not isinstance(results, torch.Tensor)


def test_a_crop_that_comes_first_in_a_nested_compose(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    inner = Compose([RandSpatialCropSamplesd(KEYS, (8, 8, 8), 2, random_size=False), RandFlipd(KEYS, 0.5, 1)])
    pipeline = Compose([EnsureTyped(KEYS), inner, RandGaussianNoised("image", prob=0.5)])
    _, pushed, _ = on_and_off(tmp_path, item, pipeline)
    assert pushed.pushed_down == 2


def test_with_cache_n_trans(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    with CacheNTransDataset([item], pipeline, 1, tmp_path) as ds:
        ds[0]
        ds.flush()
        assert ds[0]["image"].shape == (1, 8, 8, 8)
        assert ds.stats.pushed_down == 1


class Mine(RandSpatialCropd):
    """A class that nobody knows."""


@pytest.mark.parametrize(
    "step",
    [
        Mine(KEYS, (8, 8, 8), random_size=False),
        OneOf([RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)]),
        RandSpatialCropd(KEYS, (8, 8, 8), random_size=False, lazy=True),
        RandFlipd(KEYS, 0.5, 0),
    ],
    ids=["subclass", "one of", "lazy", "no crop"],
)
def test_whatever_else_comes_first_is_left_alone(tmp_path, step):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), step])
    found = find_crop(pipeline, 1)
    _, pushed, _ = on_and_off(tmp_path, item, pipeline)
    assert pushed.pushed_down == 0
    if isinstance(step, RandFlipd):
        assert found is None
        assert pushed.read_whole == {}
    else:
        assert found == WholeItem("crop_unsupported")
        assert pushed.read_whole == {"crop_unsupported": pushed.hits}


def test_a_pipeline_that_is_lazy_is_left_alone():
    whole = WholeItem("crop_unsupported")
    assert find_crop(Compose([Identityd(KEYS), RandSpatialCropd(KEYS, (8, 8, 8))], lazy=True), 1) == whole
    assert find_crop(Compose([Identityd(KEYS), RandSpatialCropd(KEYS, (8, 8, 8))], lazy=None), 1) == whole
    assert find_crop(Compose([Identityd(KEYS)]), 1) is None


def test_an_item_in_flight_is_cropped_too(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    with PersistentDataset([item], pipeline, tmp_path / "on") as ds:
        ds._cache._recorder._pool._writers = 0  # nothing is written
        ds._cache._recorder._pool._start_thread = lambda state: True
        ds[0]
        expected_draws = drawn(ds, 5)
        assert ds.stats.inflight_hits == ds.stats.pushed_down == 2
        ds._cache._recorder._pool._mine().jobs.clear()
    with PersistentDataset([item], pipeline, tmp_path / "off", crop_pushdown=False) as ds:
        ds[0]
        ds.flush()
        assert_same(expected_draws, drawn(ds, 5))


def test_what_cannot_be_done_without_memory_is_done_with_the_whole_item(tmp_path, monkeypatch):
    def needs_values(self, img, *args, **kwargs):
        if float(img.sum()) == 0.123:
            raise AssertionError
        return cropped(self, img, *args, **kwargs)

    cropped = RandSpatialCrop.__call__
    monkeypatch.setattr(RandSpatialCrop, "__call__", needs_values)
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    _, pushed, _ = on_and_off(tmp_path, item, pipeline)
    assert pushed.pushed_down == 0
    assert pushed.hits == 2


def test_global_track_meta_off(tmp_path):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    set_track_meta(False)
    try:
        on_and_off(tmp_path, item, pipeline)
    finally:
        set_track_meta(True)


def test_damage_found_by_a_patch_read_is_healed_and_shifts_no_random_draw(tmp_path, heard):
    item = make_item((40, 44, 48), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (30, 30, 30), random_size=False)])
    with PersistentDataset([item], pipeline, tmp_path / "off", crop_pushdown=False) as ds:
        ds[0]
        ds.flush()
        expected = drawn(ds, 9, n=3)
    with PersistentDataset([item], pipeline, tmp_path / "on") as ds:
        ds[0]
        ds.flush()
        (shard,) = (tmp_path / "on").glob("cache.zarr/*/image/c/0/0/0/0")
        data = bytearray(shard.read_bytes())
        data[len(data) // 3] ^= 1
        shard.write_bytes(data)
        assert_same(expected, drawn(ds, 9, n=3))
        ds.flush()
        assert ds.stats.damaged == 1
        assert ds.stats.stored == 2
    assert len(heard) == 1


def test_case_26_bytes_read_are_those_of_the_chunks_that_overlap(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    item = {"image": MetaTensor(torch.as_tensor(rng.normal(size=(1, 96, 96, 96)).astype("f4")))}
    crop = RandSpatialCropd(["image"], (20, 20, 20), random_size=False)
    read = []
    pread = files.read_exactly
    monkeypatch.setattr(files, "read_exactly", lambda fd, a, b: read.append(b - a) or pread(fd, a, b))
    with PersistentDataset([item], Compose([EnsureTyped("image"), crop]), tmp_path, chunks=(16, 16, 16)) as ds:
        ds[0]
        ds.flush()
        ds[0]
        stored = ds.stats.stored_bytes
        read.clear()
        patches = 20
        for _ in range(patches):
            ds[0]
    # A patch of 20 overlaps 2 or 3 chunks of 16 along each axis: 27 of 216 chunks at most; ranges may span gaps.
    assert sum(read) / patches < stored * 27 / 216 * 1.1
    assert sum(read) / patches > stored * 8 / 216 * 0.9


def test_patches_that_share_chunks_decode_them_once(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    item = {"image": MetaTensor(torch.as_tensor(rng.normal(size=(1, 64, 64, 64)).astype("f4")))}
    crop = RandSpatialCropSamplesd(["image"], (60, 60, 60), 4, random_size=False)
    decoded = []
    decode = reader.decode_chunk
    monkeypatch.setattr(reader, "decode_chunk", lambda *args: decoded.append(1) or decode(*args))
    with PersistentDataset([item], Compose([EnsureTyped("image"), crop]), tmp_path, chunks=(16, 16, 16)) as ds:
        ds[0]
        ds.flush()
        ds[0]
    assert len(decoded) == 64


def test_an_array_that_contradicts_the_payload_is_damage(tmp_path, monkeypatch):
    item = make_item((20, 24, 28), 1, torch.float32, 1)
    pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    with PersistentDataset([item], pipeline, tmp_path, on_error="raise") as ds:
        ds[0]
        ds.flush()
        monkeypatch.setattr(
            "zcache.storage.entry.StoredEntry.describe", lambda self, name: ((1, 2, 3, 4), np.dtype("f4"))
        )
        with pytest.raises(EntryDamagedError, match="disagree"):
            ds[0]


@pytest.mark.parametrize(
    ("crop", "patch"),
    [
        (RandSpatialCropd(KEYS, (8, 9, 10), random_size=False), (8, 9, 10)),
        (RandSpatialCropd(KEYS, 8, random_size=False), (8, 8, 8)),
        (RandSpatialCropSamplesd(KEYS, [8, -1, 10], 2, random_size=False), (8, -1, 10)),
        (RandSpatialCropSamples((8, 9), 2, random_size=False), (8, 9)),
        (RandCropByPosNegLabeld(KEYS, "label", (8, 9, None)), (8, 9, 0)),
        (RandCropByLabelClassesd(KEYS, "label", np.array([8, 9, 10]), num_classes=2), ()),
        (RandWeightedCropd(KEYS, "label", (8, 9, 10)), (8, 9, 10)),
        (RandScaleCropd(KEYS, 0.5), ()),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, tuple) else str(v),
)
def test_the_size_of_a_crop_guides_the_chunks(crop, patch):
    assert find_crop(Compose([Identityd(KEYS), crop]), 1).patch == patch


def test_chunks_of_an_entry_follow_the_crop(tmp_path):
    item = make_item((96, 96, 96), 1, torch.float32, 1)
    for name, roi in (("slices", (1, 96, 96)), ("cubes", (24, 24, 24))):
        pipeline = Compose([EnsureTyped(KEYS), RandSpatialCropd(KEYS, roi, random_size=False)])
        with PersistentDataset([item], pipeline, tmp_path / name) as ds:
            ds[0]
            ds.flush()
            (key,) = ds._cache.keys()
            entry, _ = ds._cache._entries.open(key)
            chunks = entry.record.arrays["image"].grid.chunk_shape
        assert chunks == {"slices": (1, 2, 96, 96), "cubes": (1, 32, 24, 24)}[name]
