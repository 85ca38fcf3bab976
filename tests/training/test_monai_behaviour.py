"""What users of MONAI's PersistentDataset and CacheNTransDataset rely on."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path

import monai.data
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor, json_hashing, pickle_hashing
from monai.transforms import (
    Compose,
    EnsureTyped,
    Flip,
    Identity,
    Lambda,
    LoadImaged,
    RandGaussianNoise,
    RandGaussianNoised,
    SimulateDelayd,
    Transform,
)
from monai.utils import set_determinism
from torch.utils.data import Subset

from tests.strategies import assert_same
from tests.training.helpers import Draw, Shift, entries, loading
from zcache import CacheNTransDataset, PersistentDataset
from zcache.training.dataset import default_cache_dir


class ChangesItsInput(Transform):
    """Grow an empty list, add pi to the first number of another: in place."""

    def __call__(self, data):
        if data:
            data[0] += math.pi
        else:
            data.append(1)
        return data


NUMBERS = [[list(range(i))] for i in range(5)]


@pytest.mark.parametrize("theirs", [monai.data.PersistentDataset, monai.data.CacheNTransDataset])
def test_the_arguments_have_monais_names_in_monais_order(theirs):
    ours = {"PersistentDataset": PersistentDataset, "CacheNTransDataset": CacheNTransDataset}[theirs.__name__]
    expected = list(inspect.signature(theirs).parameters)
    got = [
        name
        for name, p in inspect.signature(ours).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    assert got[: len(expected)] == expected
    assert len(got) == len(expected)


def test_the_defaults_are_monais_where_they_can_be():
    theirs = inspect.signature(monai.data.PersistentDataset).parameters
    ours = inspect.signature(PersistentDataset).parameters
    same = {name for name, p in theirs.items() if p.default == ours[name].default}
    assert theirs.keys() - same == {"cache_dir", "hash_func", "track_meta"}


@pytest.mark.parametrize("ours", [PersistentDataset, CacheNTransDataset])
def test_a_data_set_is_one_of_monais(ours, tmp_path):
    ds = ours([1, 2], Lambda(str), *([1] if ours is CacheNTransDataset else []), tmp_path)
    assert isinstance(ds, monai.data.Dataset)
    assert isinstance(ds, torch.utils.data.Dataset)
    assert len(ds) == 2
    assert isinstance(ds.transform, Compose)
    assert ds.cache_dir == tmp_path


def test_all_arguments_may_be_positional(tmp_path):
    ds = PersistentDataset(
        [{"x": 1}], [Shift()], tmp_path, pickle_hashing, "pickle", 2, pickle_hashing, True, True, False
    )
    ds[0]
    ds.flush()
    assert ds[0]["x"][0] == 2
    assert ds.stats.hits == 1
    with CacheNTransDataset(
        [{"x": 1}], [Shift(), Draw()], 1, tmp_path, pickle_hashing, "pickle", 2, pickle_hashing, True
    ) as ds:
        ds[0]


def test_the_items_are_not_changed_in_place(tmp_path):
    items = copy.deepcopy(NUMBERS)
    expected = [[[1]], [[math.pi]], [[math.pi, 1]], [[math.pi, 1, 2]], [[math.pi, 1, 2, 3]]]
    for hash_func in (None, json_hashing, pickle_hashing):
        for _ in range(2):
            with PersistentDataset(items, ChangesItsInput(), tmp_path, hash_func=hash_func) as ds:
                assert list(ds) == expected
                assert list(ds) == expected
            assert items == NUMBERS
    assert len(entries(tmp_path)) == 3 * len(items)
    assert list(PersistentDataset(items, ChangesItsInput(), None)) == expected
    assert items == NUMBERS


class ChangesWhatIsNested(Transform):
    def __call__(self, data):
        data["numbers"].append(1)
        data["array"] += 1
        data["new"] = True
        return data


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_nested_in_the_items_is_not_changed_in_place(cached, tmp_path):
    items = [{"numbers": [i], "array": np.full(3, i)} for i in range(3)]
    before = copy.deepcopy(items)
    expected = [{"numbers": [i, 1], "array": np.full(3, i + 1), "new": True} for i in range(3)]
    with PersistentDataset(items, ChangesWhatIsNested(), tmp_path if cached else None) as ds:
        for _ in range(2):
            assert_same(expected, list(ds))
            assert_same(before, items)
            ds.flush()


@pytest.fixture
def three_each(tmp_path) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    items = []
    for i in range(2):
        item = {key: str(tmp_path / f"{key}{i}.nii.gz") for key in ("image", "label", "extra")}
        for path in item.values():
            nib.save(nib.Nifti1Image(rng.integers(0, 2, (32, 24, 28)).astype(float), np.eye(4)), path)
        items.append(item)
    return items


@pytest.mark.parametrize("composed", [True, False])
def test_shapes_and_values_before_and_after_caching(composed, three_each, tmp_path):
    keys = ("image", "label", "extra")
    steps = [LoadImaged(keys), SimulateDelayd(keys, delay_time=(1e-7, 1e-6, 1e-5))]
    transform = Compose(steps) if composed else steps
    cache_dir = tmp_path / "new" / "cache"
    before_ds = PersistentDataset(three_each, transform, cache_dir)
    before = [before_ds[0], before_ds[1]]
    before_ds.flush()
    after_ds = PersistentDataset(three_each, transform, cache_dir)
    after = [after_ds[0], after_ds[1], *after_ds[0:2], *after_ds[[1, 0]]]
    assert after_ds.stats.misses == 0
    for item in (*before, *after):
        assert {tuple(item[k].shape) for k in keys} == {(32, 24, 28)}
    for item, of in zip(after, [0, 1, 0, 1, 1, 0], strict=True):
        assert_same(before[of], item)


def test_a_pipeline_of_none_returns_the_items_and_stores_nothing(three_each, tmp_path):
    with PersistentDataset(three_each, None, tmp_path / "c") as ds:
        assert list(ds) == three_each
        ds.set_data([{"image": "new"}])
        assert ds[0] == {"image": "new"}
        assert len(ds) == 1
    assert not entries(tmp_path / "c")
    with CacheNTransDataset(three_each, None, 0, tmp_path / "c") as ds:
        assert list(ds) == three_each


def test_slices_and_lists_give_subsets(tmp_path):
    ds = PersistentDataset([{"x": i} for i in range(6)], Shift(), tmp_path)
    for subset, values in ((ds[1:4], [2, 3, 4]), (ds[::-2], [6, 4, 2]), (ds[[5, 0]], [6, 1]), (ds[(2,)], [3])):
        assert isinstance(subset, Subset)
        assert subset.dataset is ds
        assert [int(item["x"][0]) for item in subset] == values
    assert ds[-1]["x"][0] == 6
    ds.close()


def test_different_transforms_share_a_directory(tmp_path):
    image = np.arange(720.0).reshape(1, 10, 9, 8)
    for kwargs in ({}, {"hash_transform": pickle_hashing}, {"hash_transform": json_hashing}):
        for _ in range(2):
            with PersistentDataset([image], Identity(), tmp_path, **kwargs) as ds:
                same = ds[0]
            with PersistentDataset([image], Flip(1), tmp_path, **kwargs) as ds:
                flipped = ds[0]
            assert_same(np.asarray(same), image)
            assert_same(np.ascontiguousarray(np.asarray(flipped)), np.ascontiguousarray(image[:, :, ::-1]))


@pytest.mark.parametrize(
    "hash_transform", [json_hashing, pickle_hashing, lambda ts: repr([vars(t) for t in ts]).encode()]
)
def test_parameters_of_transforms_count_whatever_hashes_them(hash_transform, tmp_path):
    for amount in (1.0, 2.0):
        with PersistentDataset([{"x": 1}], Shift(amount), tmp_path, hash_transform=hash_transform) as ds:
            assert ds[0]["x"][0] == 1 + amount
            ds.flush()
            assert ds[0]["x"][0] == 1 + amount
            assert (ds.stats.misses, ds.stats.hits) == (1, 1)
    assert len(entries(tmp_path)) == 2


def test_a_hash_of_transforms_gets_those_that_are_cached_without_nesting(tmp_path):
    seen = []

    def hash_transform(transforms):
        seen.append([type(t).__name__ for t in transforms])
        return b"same for all"

    steps = [Identity(), Compose([Flip(0), Compose([Identity()])]), RandGaussianNoise(), Flip(1)]
    PersistentDataset([1], steps, tmp_path, hash_transform=hash_transform)
    assert seen == [["Identity", "Flip", "Identity"]]


def test_how_items_are_made_counts_beside_a_hash_of_transforms(volumes, tmp_path):
    def hash_transform(transforms):
        return b"same for all"

    for lazy in (False, True):
        for reset in (False, True):
            pipeline = Compose(loading(), lazy=lazy)
            with PersistentDataset(
                volumes[:1], pipeline, tmp_path, hash_transform=hash_transform, reset_ops_id=reset
            ) as ds:
                ds[0]
    assert len(entries(tmp_path)) == 4


def test_a_hash_of_the_item_decides_alone(tmp_path):
    with PersistentDataset([{"x": 1}, {"x": 2}], Shift(), tmp_path, hash_func=lambda item: b"one for all") as ds:
        assert ds[0]["x"][0] == 2
        ds.flush()
        assert ds[1]["x"][0] == 2
        assert ds.stats.hits == 1


def test_case_10_set_data_never_deletes_anybodys_entries(tmp_path):
    first = PersistentDataset([{"x": 1}, {"x": 2}], Shift(), tmp_path)
    other = PersistentDataset([{"x": 7}], Shift(), tmp_path)
    for ds in (first, other):
        list(ds)
        ds.flush()
    before = entries(tmp_path)
    assert len(before) == 3
    first.set_data([{"x": 3}, {"x": 1}])
    assert len(first) == 2
    assert [int(item["x"][0]) for item in first] == [4, 2]
    first.flush()
    assert set(before) < set(entries(tmp_path))
    assert (first.stats.misses, first.stats.hits) == (3, 1)
    first.set_data([])
    assert set(before) < set(entries(tmp_path))
    assert other[0]["x"][0] == 8
    assert (other.stats.misses, other.stats.hits) == (1, 1)


def test_no_directory_means_no_caching(tmp_path, monkeypatch):
    monkeypatch.setenv("ZCACHE_DIR", str(tmp_path / "unused"))
    with PersistentDataset([{"x": 1}], Shift(), None) as ds:
        assert ds.cache_dir is None
        assert ds[0]["x"][0] == 2
        ds.flush()
        assert ds.stats.misses == 0
    assert CacheNTransDataset([{"x": 1}], Shift(), 1, None)[0]["x"][0] == 2
    assert not (tmp_path / "unused").exists()


def test_without_a_directory_the_environment_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ZCACHE_DIR", str(tmp_path / "mine"))
    for ds in (PersistentDataset([{"x": 1}], Shift()), CacheNTransDataset([{"x": 2}], Shift(), 1)):
        with ds:
            assert ds.cache_dir == tmp_path / "mine"
            ds[0]
    assert len(entries(tmp_path / "mine")) == 2


def test_without_a_directory_and_environment_the_platform_names_it(tmp_path, monkeypatch):
    monkeypatch.delenv("ZCACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor=None: str(tmp_path / name))
    assert default_cache_dir() == tmp_path / "zcache"
    with PersistentDataset([{"x": 1}], Shift()) as ds:
        ds[0]
    assert len(entries(tmp_path / "zcache")) == 1
    monkeypatch.setenv("ZCACHE_DIR", "")
    assert default_cache_dir() == tmp_path / "zcache"


def test_a_file_in_place_of_the_directory_is_a_clear_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ValueError, match="cache_dir must be a directory") as e:
        PersistentDataset([1], Lambda(str), path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_directory_is_made_when_it_is_needed(kind, tmp_path):
    folder = tmp_path / "a" / "b"
    with PersistentDataset([{"x": 1}], Shift(), kind(folder)) as ds:
        ds[0]
    assert len(entries(folder)) == 1


def test_a_failing_hash_of_transforms_is_not_hidden(tmp_path):
    def broken(transforms):
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        PersistentDataset([1], Identity(), tmp_path, hash_transform=broken)


@pytest.mark.parametrize("track_meta", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_metadata_is_tracked_as_asked(track_meta, weights_only, volumes, tmp_path):
    kind = MetaTensor if track_meta else torch.Tensor
    for _ in range(2):
        with PersistentDataset(
            volumes[:1], loading(), tmp_path, track_meta=track_meta, weights_only=weights_only
        ) as ds:
            assert type(ds[0]["image"]) is kind


def test_metadata_of_any_kind_comes_back(tmp_path):
    meta = {"number": 123, "text": "bar", "tuple": (1, 2, 3)}
    image = MetaTensor(torch.rand(1, 24, 24, 24), meta=dict(meta), affine=torch.rand(4, 4))
    for _ in range(2):
        with PersistentDataset([{"image": image}], Compose([Identity()]), tmp_path) as ds:
            got = ds[0]["image"]
        assert type(got) is MetaTensor
        assert {k: got.meta[k] for k in meta} == meta
        assert_same(image.affine, got.affine)
        assert_same(image, got)
    assert ds.stats.hits == 1


def test_nothing_of_a_hostile_object_is_ever_run(tmp_path, heard):
    class Hostile:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    image = MetaTensor(torch.rand(1, 16, 16, 16), meta={"bad": Hostile()})
    for _ in range(2):
        with PersistentDataset(
            [{"name": 1}], Lambda(lambda d: {"image": image}), tmp_path / "c", hash_transform=lambda t: b"x"
        ) as ds:
            assert type(ds[0]["image"]) is MetaTensor
            assert ds.stats.skipped == {"unstorable": 1}
    assert not (tmp_path / "executed").exists()
    assert not entries(tmp_path / "c")
    assert len(heard) == 2


def test_cache_n_trans_freezes_the_random_ones_among_the_first_n(tmp_path):
    data = [{"x": float(i)} for i in range(3)]
    with CacheNTransDataset(data, [Shift(), Draw(), Draw()], 2, tmp_path) as ds:
        frozen = {i: float(ds._cachecheck(data[i])["x"][0]) for i in range(3)}
        ds.flush()
        first, second = ([float(item["x"][0]) for item in ds] for _ in range(2))
        assert first != second  # the last one is drawn every time
        for i in range(3):
            assert float(ds._cachecheck(data[i])["x"][0]) == frozen[i]
            assert 0 < frozen[i] - (i + 1) < 1
            assert frozen[i] <= min(first[i], second[i])
        assert ds.stats.misses == 3
    with CacheNTransDataset(data, [Shift(), Draw()], 2, tmp_path) as ds:
        assert [float(item["x"][0]) for item in ds] == list(frozen.values())
        assert ds.stats.hits == 3


def test_cache_n_trans_stops_before_what_is_deterministic_too(tmp_path):
    log = []

    class Logged(Identity):
        def __init__(self, name):
            self.name = name

        def __call__(self, data):
            log.append(self.name)
            return data

    with CacheNTransDataset([{"x": 1}], [Logged("a"), Logged("b"), Logged("c")], 2, tmp_path) as ds:
        ds[0]
        ds.flush()
        ds[0]
    assert log == ["a", "b", "c", "c"]


def test_cache_n_trans_takes_plain_functions(tmp_path):
    with CacheNTransDataset([{"x": 1}], [dict, Shift(), dict], 3, tmp_path) as ds:
        first = ds[0]
        ds.flush()
        assert_same(first, ds[0])
        assert ds.stats.hits == 1


def test_cache_n_trans_of_zero_caches_nothing(tmp_path, heard):
    with CacheNTransDataset([{"x": 1.0}], [Shift()], 0, tmp_path) as ds:
        assert ds[0]["x"][0] == 2
        ds.flush()
        assert ds[0]["x"][0] == 2
    assert ["cache_n_trans=0" in str(w.message) for w in heard] == [True]
    assert not entries(tmp_path)


def test_another_n_is_another_entry(tmp_path):
    for n in (1, 2):
        with CacheNTransDataset([{"x": 1}], [Shift(), Identity()], n, tmp_path) as ds:
            ds[0]
    assert len(entries(tmp_path)) == 2


def test_monai_s_dataloader_seeds_the_random_transforms_as_it_does_with_its_own_dataset(tmp_path):
    def drawn(make):
        set_determinism(11)
        loader = monai.data.DataLoader(make([{"x": torch.zeros(1, 8)}] * 3, pipeline()), num_workers=0)
        return [batch["x"] for _ in range(2) for batch in loader]

    def pipeline():
        return Compose([EnsureTyped("x"), RandGaussianNoised("x", prob=0.5)])

    expected = drawn(monai.data.Dataset)
    actual = drawn(lambda data, transform: PersistentDataset(data, transform, tmp_path))
    set_determinism(None)
    assert_same(expected, actual)
