"""Cases 29 to 34 of ../shared/cases.md, as a data set meets them. The fingerprints have tests of their own."""

from __future__ import annotations

import importlib.util
import linecache
import os
import random
import shutil
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    Lambda,
    Lambdad,
    LoadImaged,
    OneOf,
    Orientationd,
    RandFlipd,
    RandRotated,
    Rotate90d,
    Spacingd,
)

import zcache
from tests.strategies import assert_same
from tests.training.helpers import KEYS, entries, first_item, in_fresh_process, loading, plain, python, without_ids
from zcache import PersistentDataset, ZCacheWarning

USERS_MODULE = """
import enum
import numpy as np
import torch
from monai.transforms import Lambdad, Transform

class Mode(enum.Enum):
    FAST = "fast"

def scaled(factor, offset=0.5):
    return lambda x: torch.full((3000,), float(x)) * factor + offset

class Select(Transform):
    def __init__(self, names):
        self.names = set(names)
        self.mode = Mode.FAST
        self.table = {name: np.arange(3) for name in names}
    def __call__(self, data):
        return {k: v for k, v in data.items() if k in self.names}

def pipeline(factor):
    return [Select(["x", "y", "zz", "image", "label"]), Lambdad("x", scaled(factor)), Lambdad("y", lambda y: y * 2)]
"""
FRESH = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("users_module", sys.argv[1])
sys.modules["users_module"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from zcache import PersistentDataset
out = []
for factor in (2.0, 3.0, 2.5):
    with PersistentDataset([{"x": 1, "y": 2, "other": 3}], module.pipeline(factor), sys.argv[2]) as ds:
        out.append([float(ds[0]["x"][0]), ds[0]["y"], ds.stats.misses])
print(json.dumps(out))
"""


def users_pipeline(path: Path, factor: float):
    spec = importlib.util.spec_from_file_location("users_module", path)
    sys.modules["users_module"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pipeline(factor)


def test_case_29_and_30_lambdas_closures_and_sets_have_the_same_key_in_every_process(tmp_path):
    path, cache_dir = tmp_path / "users_module.py", tmp_path / "c"
    path.write_text(USERS_MODULE)
    data = [{"x": 1, "y": 2, "other": 3}]
    for factor in (2.0, 3.0):
        with PersistentDataset(data, users_pipeline(path, factor), cache_dir) as ds:
            assert float(ds[0]["x"][0]) == factor + 0.5
            assert ds.stats.misses == 1
    assert len(entries(cache_dir)) == 2
    found = python(FRESH, path, cache_dir, PYTHONHASHSEED="4242")
    assert found == [[2.5, 4, 0], [3.5, 4, 0], [3.0, 4, 1]]
    assert len(entries(cache_dir)) == 3


def test_case_29_a_function_written_twice_in_a_notebook_has_one_key_and_an_edited_one_another(tmp_path):
    def cell(text: str, number: int):
        name = f"<ipython-input-{number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        scope = {"__name__": "__main__", "torch": torch}
        exec(compile(text, name, "exec"), scope)
        return scope["f"]

    first = "def f(x):\n    return torch.full((3000,), x + 1.0)\n"
    counts = []
    for number, text in enumerate([first, first, first.replace("1.0", "2.0")]):
        with PersistentDataset([{"x": 1}], Lambdad("x", cell(text, number)), tmp_path) as ds:
            value = float(ds[0]["x"][0])
        counts.append((value, ds.stats.misses, len(entries(tmp_path))))
    assert counts == [(2.0, 1, 1), (2.0, 0, 1), (3.0, 1, 2)]


def test_case_29_captured_constants_and_defaults_count(tmp_path):
    def adding(n, times=1):
        return Lambdad("x", lambda x, times=times: torch.full((2000,), float(x)) + n * times)

    for steps in (adding(1), adding(2), adding(2, 3), adding(torch.tensor(4.0))):
        with PersistentDataset([{"x": 0}], steps, tmp_path) as ds:
            value = ds[0]["x"]
            ds.flush()
            assert_same(plain([{"x": 0}], steps)[0]["x"], value)
            assert ds.stats.misses == 1
    assert len(entries(tmp_path)) == 4


@pytest.mark.parametrize("kind", [str, Path])
def test_case_31_a_moved_data_set_keeps_its_entries_with_root(kind, volumes, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there" / "deeper"
    here.mkdir()
    for item in volumes:
        for path in item.values():
            shutil.copy2(path, here)
    shutil.copytree(here, there)
    steps = [LoadImaged(KEYS), EnsureChannelFirstd(KEYS)]

    def data(folder):
        return [{k: kind(folder / Path(v).name) for k, v in item.items()} for item in volumes]

    with PersistentDataset(data(here), steps, tmp_path / "c", root=here) as ds:
        expected = list(ds)
    with PersistentDataset(data(there), steps, tmp_path / "c", root=there) as ds:
        assert_same(expected, list(ds))
        assert (ds.stats.hits, ds.stats.misses) == (4, 0)
    with PersistentDataset(data(there), steps, tmp_path / "c") as ds:  # without root, elsewhere is another file
        list(ds)
        assert ds.stats.hits == 0


def test_case_31_an_edited_file_is_noticed_unless_told_not_to_look(volumes, tmp_path):
    path = tmp_path / "image.nii.gz"
    shutil.copy2(volumes[0]["image"], path)
    data, steps = [{"image": str(path)}], loading(("image",))

    def value(**kwargs):
        with PersistentDataset(data, steps, tmp_path / "c", **kwargs) as ds:
            return float(ds[0]["image"][0, 20, 18, 15])

    before = value()
    blind = value(check_sources=False)
    assert before == blind
    edited = nib.Nifti1Image(np.full((40, 36, 30), 77, np.int16), np.eye(4))
    nib.save(edited, path)
    assert value() == 77
    assert value(check_sources=False) == before
    old = path.stat()
    nib.save(nib.Nifti1Image(np.full((40, 36, 30), 78, np.int16), np.eye(4)), path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    assert value() == 78
    data[0]["image"] = Path(path)
    assert value() == 78


def test_case_31_with_a_hash_of_ones_own_an_edited_file_is_noticed_too(tmp_path):
    path = tmp_path / "number.txt"
    data, steps = (
        [{"path": str(path)}],
        Lambda(lambda d: {"x": torch.full((2000,), float(Path(d["path"]).read_text()))}),
    )
    for text in ("1.5", "2.25"):
        path.write_text(text)
        with PersistentDataset(data, steps, tmp_path / "c", hash_func=lambda item: b"fixed") as ds:
            assert float(ds[0]["x"][0]) == float(text)


def plain_function(data):
    return {**data, "x": data["x"] + 1}


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (plain_function, "plain_function"),
        (RandFlipd("x", prob=0.0), "RandFlipd"),
        (zcache.uncached(Lambdad("x", torch.abs)), "uncached(Lambdad)"),
        (Compose([RandFlipd("x", prob=0.0)]), "Compose"),
        (lambda d: d, "<lambda>"),
        (dict, "dict"),
    ],
    ids=["function", "random", "uncached", "nested random", "lambda", "class"],
)
def test_case_32_a_pipeline_that_cannot_be_cached_says_so_once_and_writes_nothing(first, name, tmp_path, heard):
    data = [{"x": torch.full((1, 5, 5), float(i))} for i in range(3)]
    with PersistentDataset(data, [first, Lambdad("x", torch.neg)], tmp_path / "c") as ds:
        for _ in range(2):
            assert len(list(ds)) == 3
        ds.set_data(data[:1])
        ds[0]
        assert ds.stats.skipped == {"nothing_to_cache": 7}
    said = [w for w in heard if issubclass(w.category, ZCacheWarning)]
    assert len(said) == 1
    assert f"its first transform, {name}," in str(said[0].message)
    assert said[0].filename == __file__
    assert not (tmp_path / "c").exists()


def test_case_32_a_pipeline_that_chooses_at_random_is_not_frozen(tmp_path, heard):
    one_of = OneOf([Lambdad("x", lambda x: x + 1), Lambdad("x", lambda x: x - 1)]).set_random_state(1)
    with PersistentDataset([{"x": torch.zeros(1)}], one_of, tmp_path / "c") as ds:
        assert {float(ds[0]["x"]) for _ in range(30)} == {1.0, -1.0}
    assert [("OneOf" in str(w.message)) for w in heard] == [True]
    assert not (tmp_path / "c").exists()


class Drawing:
    """Hidden randomness: MONAI cannot see that this draws."""

    def __zcache_fingerprint__(self):
        return "drawing"

    def __call__(self, x):
        return torch.full((2000,), float(x)) + random.random()


def test_case_33_hidden_randomness_is_frozen_and_the_marker_keeps_it_out(tmp_path):
    hidden = Lambdad("x", Drawing())
    with PersistentDataset([{"x": 1}], [Lambdad("y", str, allow_missing_keys=True), hidden], tmp_path / "frozen") as ds:
        first = ds[0]["x"]
        ds.flush()
        assert torch.equal(ds[0]["x"], first)  # documented: MONAI does the same
    steps = [Lambdad("x", lambda x: x + 1), zcache.uncached(hidden), Lambdad("x", torch.neg)]
    with PersistentDataset([{"x": 1}], steps, tmp_path / "drawn") as ds:
        values = [ds[0]["x"]]
        ds.flush()
        values += [ds[0]["x"], ds[0]["x"]]
        assert (ds.stats.misses, ds.stats.hits) == (1, 2)
    assert len({float(v[0]) for v in values}) == 3
    assert all(-3 < float(v[0]) < -2 for v in values)


LAZY = {
    "all lazy": lambda: Compose(
        [
            *loading(),
            Orientationd(KEYS, "RAS", labels=None),
            Rotate90d(KEYS),
            Spacingd(KEYS, (1.3, 1.3, 1.7), mode=("bilinear", "nearest")),
        ],
        lazy=True,
    ),
    "some lazy": lambda: Compose(
        [
            *loading(),
            Orientationd(KEYS, "RAS", labels=None, lazy=True),
            Spacingd(KEYS, (1.3,) * 3, mode=("bilinear", "nearest"), lazy=True),
        ],
        lazy=None,
    ),
    "overridden": lambda: Compose(
        [*loading(), Rotate90d(KEYS), Spacingd(KEYS, (1.3,) * 3)], lazy=True, overrides={"label": {"mode": "nearest"}}
    ),
}


@pytest.mark.parametrize("name", LAZY)
def test_case_34_pending_operations_at_the_split_are_applied_before_caching(name, volumes, tmp_path):
    (expected,) = plain(volumes[:1], LAZY[name]())
    with PersistentDataset(volumes[:1], LAZY[name](), tmp_path, on_error="raise") as ds:
        miss = ds[0]
        ds.flush()
        hit = ds[0]
        assert ds.stats.hits == 1
    for got in (miss, hit):
        assert_same(expected, got)
        assert all(not v.pending_operations for v in got.values() if isinstance(v, MetaTensor))


def test_case_34_a_lazy_random_transform_after_the_split_sees_the_same_on_a_hit(volumes, tmp_path):
    def item(cache_dir):
        pipeline = LAZY["all lazy"]()
        pipeline = Compose(
            [*pipeline.transforms, RandRotated(KEYS, 0.3, prob=1.0, mode=("bilinear", "nearest"))], lazy=True
        )
        pipeline.set_random_state(5)
        with PersistentDataset(volumes[:1], pipeline, cache_dir, on_error="raise") as ds:
            return without_ids(ds[0]), ds.stats.hits

    uncached, _ = item(None)
    miss, hits_before = item(tmp_path)
    hit, hits = item(tmp_path)
    assert (hits_before, hits) == (0, 1)
    assert_same(uncached, miss)
    assert_same(uncached, hit)


def test_case_34_how_a_pipeline_is_composed_is_part_of_the_key(volumes, tmp_path):
    steps = [*loading(), Rotate90d(KEYS), Spacingd(KEYS, (1.3,) * 3)]
    for kwargs in ({}, {"lazy": True}, {"lazy": True, "overrides": {"label": {"mode": "nearest"}}}):
        with PersistentDataset(volumes[:1], Compose(steps, **kwargs), tmp_path) as ds:
            ds[0]
            assert ds.stats.misses == 1
    assert len(entries(tmp_path)) == 3


def test_case_30_a_worker_that_is_started_afresh_finds_what_the_parent_stored(volumes, tmp_path):
    steps = [*loading(), Lambdad("image", _half), Orientationd(KEYS, "RAS", labels=None)]
    expected, _ = first_item(volumes, steps, str(tmp_path))
    got, stats = in_fresh_process(first_item, volumes, steps, str(tmp_path))
    assert (stats.hits, stats.misses) == (1, 0)
    assert_same(expected, got)


def _half(x):
    return x / 2
