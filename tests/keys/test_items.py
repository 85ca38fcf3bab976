"""Keys: items and their source files, descriptions for people, and the key itself."""

import builtins
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai import transforms as mt
from monai.data import MetaTensor

from zcache.errors import FingerprintError
from zcache.keys import (
    canonical_json,
    describe,
    digest,
    entry_key,
    fingerprint,
    ingredients,
    item_fingerprint,
    source_paths,
)


def key(pipeline, item="a", precision="lossless", switches=(), versions=()):
    form = fingerprint(pipeline)
    return entry_key(
        ingredients(item=item, pipeline=form, precision=precision, switches=dict(switches), versions=dict(versions))
    )


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    (root / "series" / "sub").mkdir(parents=True)
    for name in ("a.nii.gz", "b.nii.gz", "series/1.dcm", "series/sub/2.dcm"):
        (root / name).write_text(name)
        os.utime(root / name, ns=(1, 10**18))
    return root


# ---- the key


def test_key_is_128_bits_in_hexadecimal():
    assert len(key(None)) == 32
    assert int(key(None), 16) >= 0
    assert key(None) == key(None)


def test_key_depends_on_each_part():
    switched, versioned = key(None, switches={"monai.track_meta": False}), key(None, versions={"monai": "1.6.1"})
    keys = {key(None), key([]), key(None, item="b"), key(None, precision="float16"), switched, versioned}
    assert len(keys) == 6


def test_key_parts_cannot_be_shifted_into_each_other():
    assert key(None, item="a,b", precision="c") != key(None, item="a", precision="b,c")


def test_canonical_json_refuses_what_json_has_no_text_for():
    assert canonical_json({"b": [1, None, "é"], "a": True}) == '{"a":true,"b":[1,null,"\\u00e9"]}'
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


def test_case_01_parameter_edit_changes_key():
    def pipeline(spacing, mode="bilinear"):
        return mt.Compose([mt.LoadImaged("image"), mt.Spacingd("image", (spacing, 1.0, 1.0), mode=mode)])

    assert key(pipeline(1.5)) == key(pipeline(1.5))
    assert len({key(pipeline(1.5)), key(pipeline(1.0)), key(pipeline(1.5, "nearest"))}) == 3


def test_case_01_order_and_number_of_transforms_change_key():
    a, b = mt.Flipd("image", 0), mt.Rotate90d("image")
    assert len({key(mt.Compose(steps)) for steps in ([a, b], [b, a], [a], [a, a, b])}) == 4


def test_case_02_array_parameters_change_key():
    def pipeline(b_max):
        return mt.Compose([mt.ScaleIntensityRanged("image", -57, 164, np.zeros(3), b_max)])

    keys = {
        key(pipeline(value)) for value in (np.ones(3), np.array([1, 1, 2.0]), np.ones(3, "f4"), torch.ones(3), 1, 1.0)
    }
    assert len(keys) == 6
    assert key(pipeline(np.ones(3))) == key(pipeline(np.ones(3)))


# ---- items


def test_item_of_any_nesting():
    item = {"a": [1, (2.0, None)], "b": np.arange(3), "c": torch.ones(2), "d": {"x": b"1"}, "e": True}
    assert item_fingerprint(item) == item_fingerprint(dict(reversed(item.items())))
    for name, value in (("a", [1, [2.0, None]]), ("b", np.arange(4)), ("c", torch.ones(3)), ("e", 1)):
        assert item_fingerprint({**item, name: value}) != item_fingerprint(item)


def test_item_with_a_metatensor():
    image = MetaTensor(torch.ones(1, 2, 2), meta={"filename_or_obj": "x"})
    assert item_fingerprint(image) == item_fingerprint(image.clone())
    assert item_fingerprint(image) != item_fingerprint(image.as_tensor())


def test_item_that_cannot_be_described_names_the_place():
    with pytest.raises(FingerprintError, match=r"item: no cache key for item\['f'\]\[0\] .* pass hash_func="):
        item_fingerprint({"f": [(i for i in range(2))]})


def test_strings_and_paths_differ_since_the_item_returned_does(data):
    for name in (data / "a.nii.gz", data / "missing", data / "series"):
        assert item_fingerprint(name) != item_fingerprint(str(name))


@pytest.mark.parametrize("text", ["", "P001", "a\0b", "x" * 5000, "/" + "x" * 5000, "\ud800", "no/such/file", "a\nb"])
def test_strings_that_name_nothing_are_text(text):
    assert item_fingerprint(text) == text
    assert item_fingerprint(text, root="/elsewhere") == text


def test_dictionary_keys_are_names_not_files(data, monkeypatch):
    monkeypatch.chdir(data)
    assert item_fingerprint({"a.nii.gz": 1}) == ["dict", [["a.nii.gz", ["int", 1]]]]


def test_case_31_size_and_time_of_a_file_count(data):
    path = data / "a.nii.gz"
    before = item_fingerprint({"image": str(path)})
    assert before == ["dict", [["image", ["file", str(path), 8, 10**18]]]]
    os.utime(path, ns=(1, 10**18 + 1))
    touched = item_fingerprint({"image": str(path)})
    path.write_text("longer than before")
    os.utime(path, ns=(1, 10**18))
    edited = item_fingerprint({"image": str(path)})
    assert len({digest(form) for form in (before, touched, edited)}) == 3


def test_case_31_without_check_sources_nothing_is_asked(data, monkeypatch):
    path = data / "a.nii.gz"
    item = {"image": str(path), "series": data / "series", "name": "P001"}
    before = item_fingerprint(item, check_sources=False, root=data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *_, **__: pytest.fail("stat was called"))
        patch.setattr(os, "scandir", lambda *_: pytest.fail("scandir was called"))
        path.write_text("edited")
        assert item_fingerprint(item, check_sources=False, root=data) == before


def test_case_31_no_file_is_opened(data, monkeypatch):
    calls = []
    with monkeypatch.context() as patch:
        for module in (os, builtins):
            patch.setattr(module, "open", lambda *_, **__: pytest.fail("a file was opened"))
        stat = os.stat
        patch.setattr(os, "stat", lambda path, **_: calls.append(path) or stat(path))
        item_fingerprint({"image": str(data / "a.nii.gz"), "label": data / "b.nii.gz", "missing": "x/y"})
    assert calls == [str(data / "a.nii.gz"), str(data / "b.nii.gz"), "x/y"]


@pytest.mark.parametrize("change", ["edit", "touch", "add", "remove", "rename", "empty folder"])
def test_case_31_folders_count_with_all_that_is_in_them(data, change):
    series = data / "series"
    before = item_fingerprint(str(series))
    assert before[0] == "folder"
    assert before == item_fingerprint(str(series))
    inner = series / "sub" / "2.dcm"
    if change == "edit":
        inner.write_text("edited, and longer")
        os.utime(inner, ns=(1, 10**18))
    elif change == "touch":
        os.utime(inner, ns=(1, 2))
    elif change == "add":
        (series / "3.dcm").touch()
    elif change == "remove":
        inner.unlink()
    elif change == "rename":
        inner.rename(series / "sub" / "4.dcm")
    else:
        (series / "new").mkdir()
    assert item_fingerprint(str(series)) != before


def test_case_31_dangling_and_circular_links_in_a_folder(data):
    (data / "series" / "loop").symlink_to(data / "series")
    (data / "series" / "gone").symlink_to(data / "nothing")
    assert item_fingerprint(data / "series")[2] == 5


def test_case_31_a_word_that_is_the_name_of_a_folder_is_text(data, monkeypatch):
    monkeypatch.chdir(data)
    assert item_fingerprint("series") == "series"
    assert item_fingerprint("series/")[0] == "folder"
    assert item_fingerprint(Path("series"))[0] == "folder"
    assert item_fingerprint("a.nii.gz")[0] == "file"


def test_case_31_moved_data_keeps_its_keys_with_root(data, tmp_path, monkeypatch):
    def item(root):
        return {
            "image": str(root / "a.nii.gz"),
            "label": root / "b.nii.gz",
            "series": f"{root}/x/../series",
            "n": "P001",
        }

    moved = tmp_path / "elsewhere" / "mount"
    shutil.copytree(data, moved)
    for check in (True, False):
        here, there = (item_fingerprint(item(root), root=root, check_sources=check) for root in (data, moved))
        assert here == there
        assert str(data) not in canonical_json(here)
        assert item_fingerprint(item(data), check_sources=check) != item_fingerprint(item(moved), check_sources=check)
    monkeypatch.chdir(moved / "series")
    relative = item_fingerprint(["../a.nii.gz", "1.dcm"], root=os.path.relpath(moved))
    assert relative == item_fingerprint([str(data / "a.nii.gz"), str(data / "series" / "1.dcm")], root=data)
    os.utime(moved / "b.nii.gz")
    assert item_fingerprint(item(moved), root=moved) != item_fingerprint(item(data), root=data)


def test_case_31_only_what_lies_inside_the_root_is_relative(data):
    sibling = f"{data}-2/a.nii.gz"
    assert item_fingerprint(sibling, root=data) == sibling
    assert item_fingerprint(f"{data}/missing.nii", root=data) == ["rooted", "str", "missing.nii"]
    assert item_fingerprint(data / "series", root=data)[1] == ["rooted", "path", "series"]
    assert item_fingerprint(str(data), root=data)[1] == ["rooted", "str", "."]
    assert item_fingerprint("missing.nii", root=data) == "missing.nii"


def test_case_31_text_with_a_slash_is_not_rewritten_inside_the_root(data, monkeypatch):
    monkeypatch.chdir(data)
    for text in ("1//2", "grade 1/2", "a/../b"):
        assert item_fingerprint(text, root=data) == text


@given(
    st.recursive(st.one_of(st.text(), st.integers(), st.none()), st.lists, max_leaves=5), st.permutations(list("abc"))
)
@settings(max_examples=40, deadline=None)
def test_case_30_order_of_an_items_keys_does_not_matter(value, names):
    item = {name: [name, value] for name in names}
    assert item_fingerprint(item, check_sources=False) == item_fingerprint(
        dict(sorted(item.items())), check_sources=False
    )


# ---- source paths


def test_source_paths(data, monkeypatch):
    monkeypatch.chdir(data)
    item = {
        "image": str(data / "a.nii.gz"),
        "again": str(data / "a.nii.gz"),
        "label": [data / "b.nii.gz"],
        "plain": "a.nii.gz",
        "series": (str(data / "series"),),
        "url": "s3://bucket/x.nii.gz",
        "missing": "/nowhere/y.mha",
        "no paths": ["P001", "series", "1/2", "seen on 1/2.\nno finding.", 3, np.ones(2), "a/\0.b"],
    }
    item["me"] = item
    here = [data / "a.nii.gz", data / "b.nii.gz", "a.nii.gz", data / "series"]
    expected = [*here, "s3://bucket/x.nii.gz", "/nowhere/y.mha"]
    assert source_paths(item) == tuple(map(str, expected))
    assert source_paths("/x/y.nii") == ("/x/y.nii",)
    assert source_paths(7) == ()


# ---- describe


def test_describe_shows_what_the_user_wrote():
    composed = mt.Compose(
        [
            mt.Compose([mt.LoadImaged(["image", "label"])]),
            mt.ScaleIntensityRanged("image", a_min=-57, a_max=164, b_min=0.0, b_max=1.0, clip=True),
            mt.Lambdad("image", func=lambda x: x + 1),
            mt.OneOf([mt.Flipd("image", 0)]),
        ]
    )
    load, scale, function, choice = describe(composed)
    assert load["transform"] == "LoadImaged"
    assert scale == {
        "transform": "ScaleIntensityRanged",
        "module": "monai.transforms.intensity.dictionary",
        "parameters": {
            "keys": ["image"], "a_min": -57, "a_max": 164, "b_min": 0.0, "b_max": 1.0, "clip": True,
            "dtype": "numpy.float32", "allow_missing_keys": False,
        },
    }  # fmt: skip
    assert function["parameters"]["func"] == ["lambda x: x + 1"]
    assert choice["parameters"]["transforms"][0]["transform"] == "Flipd"


def test_describe_other_callables():
    def named(x):
        return x

    assert describe(None) == []
    assert describe(named)[0]["source"].startswith("def named(x): return x")
    assert describe(np.mean) == [{"transform": "mean", "module": "numpy", "parameters": {}}]
    (partial,) = describe(functools.partial(np.clip, a_min=0))
    assert partial["parameters"] == {"func": "numpy.clip", "args": [], "keywords": {"a_min": 0}}


class Odd:
    def __init__(self, value):
        self.value = value


class BadRepr:
    def __repr__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (BadRepr, "<BadRepr>"),
        (float("nan"), "nan"),
        (2**80, str(2**80)),
        (np.arange(3), "ndarray int64 (3,) [0, 1, 2]"),
        (np.zeros((9, 9), "f4"), "ndarray float32 (9, 9)"),
        (torch.zeros(9, 9), "Tensor torch.float32 (9, 9)"),
        ("x" * 1000, "x" * 160 + "…"),
        (list(range(100)), [*range(16), "… 100 elements"]),
        ({2, 1}, [1, 2]),
        (Odd, f"{__name__}.Odd"),
        (Path("a/b"), "a/b"),
        (torch.float32, "torch.float32"),
    ],
)
def test_describe_abbreviates_and_never_raises(value, shown):
    (step,) = describe(Odd(value() if value is BadRepr else value))  # pytest cannot stand an instance
    assert step["parameters"]["value"] == shown
    json.dumps(step, allow_nan=False)


def test_describe_survives_loops_and_odd_steps():
    loop = []
    loop.append(loop)
    assert describe([Odd(loop), BadRepr()])[1] == "<BadRepr>"
    json.dumps(describe(loop), allow_nan=False)
    shown = describe(Odd(object()))[0]["parameters"]["value"]
    assert shown == "<object object>"  # without the address, which differs from process to process
