"""Pipelines as people read them, and what tells two entries apart."""

from __future__ import annotations

import numpy as np
from monai.transforms import Compose, Lambdad, LoadImaged, Spacingd

import zcache
from tests.inspection.caches import about, fill, item
from tests.support import ct_like, key
from zcache.inspection.compare import compare
from zcache.inspection.pipelines import Pipeline, Pipelines, Step, difference, readable
from zcache.keys import describe


def pipeline(*transforms) -> Pipeline:
    return Pipeline(tuple(Step.of(step) for step in describe(Compose(transforms))))


def test_steps_of_monai():
    found = pipeline(
        LoadImaged("image"), Spacingd("image", (1.5, 1.5, 2), mode="nearest"), Lambdad("image", lambda x: x + 1)
    )
    texts = [str(step) for step in found.steps]
    assert texts[0].startswith("LoadImaged(keys=['image'], dtype=float32")
    assert "pixdim=[1.5, 1.5, 2.0], mode=['nearest'], padding_mode=['border']" in texts[1]
    assert "lambda x: x + 1" in texts[2]
    assert str(found) == "LoadImaged → Spacingd → Lambdad"
    assert str(Pipeline(())) == "no transforms"


def test_differences():
    a = pipeline(LoadImaged("image"), Spacingd("image", (1, 1, 1)))
    b = pipeline(LoadImaged("image"), Spacingd("image", (1, 1, 2)), LoadImaged("label"))
    assert difference(a, a) == []
    changed, added = difference(a, b)
    assert changed == "~ Spacingd: pixdim=[1.0, 1.0, 1.0] → [1.0, 1.0, 2.0]"
    assert added.startswith("+ LoadImaged(keys=['label']")
    assert difference(b, a)[1].startswith("− LoadImaged")
    old, new = (Pipeline((Step("f", "m", {}, source),)) for source in ("x + 1", "x + 2"))
    assert difference(old, new) == ["~ f: source x + 1 → x + 2"]
    old, new = Pipeline((Step("f", "m", {"a": 1}),)), Pipeline((Step("f", "n", {"b": 2}),))
    assert difference(old, new) == ["~ f: a=1 is gone, b=2 is new, module m → n"]


def test_whatever_was_written_can_be_read():
    for described in (3, "text", None, {"a": 1}, [], [[1]], {"transform": 1, "parameters": 7}):
        assert str(Step.of(described))
        assert readable(described)
    assert Pipelines().add("3", 3).steps[0].name == "3"
    assert readable({"a": ["torch.float32", {"transform": "F", "parameters": {"x": 1}}]}) == "{'a': [float32, F(x=1)]}"


def test_entries_that_are_the_same_and_others(cache_dir):
    changed = item(1)
    changed["image"][0, 3, 4, 5] += 7
    del changed["label"]
    changed |= {"id": "other", "extra": ct_like()}
    fill(cache_dir, {key(8): item(1), key(9): changed}, lambda _: about(1))
    view = zcache.open_cache(cache_dir)
    same = compare(view[key(1)], view[key(8)])
    assert same.same
    assert same.to_json() == {"same": True, "source": [], "pipeline": [], "values": [], "arrays": []}
    found = compare(view[key(1)], view[key(9)])
    assert not found.same
    assert found.values == ("~ id: P001 → other",)
    assert found.arrays == (
        "~ image: 1 of 84,480 values differ, by 7 at most",
        "− label 1×40×44×48 uint8",
        "+ extra 1×40×44×48 int16",
    )
    other = compare(view[key(1)], view["f" * 32])
    assert other.source[0] == "− /data/patient_001/ct.nii.gz"
    assert other.pipeline == ("~ Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]",)


def test_other_types_and_nan(tmp_path):
    nan = np.array([np.nan, 1.0])
    fill(
        tmp_path / "c",
        {
            key(1): {"a": nan, "b": nan, "t": np.array(["x"])},
            key(2): {"a": nan.astype("f4"), "b": -nan, "t": np.array(["y"])},
        },
    )
    view = zcache.open_cache(tmp_path / "c")
    assert compare(view[key(1)], view[key(2)]).arrays == (
        "~ a: ndarray 2 float64 → ndarray 2 float32",
        "~ b: 2 of 2 values differ, by 2 at most",
        "~ t: 1 of 1 values differ",
    )
