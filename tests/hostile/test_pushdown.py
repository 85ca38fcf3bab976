"""Reading part of an entry, as crops do: rot and forgeries meet the same checks on the way of the data set."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.transforms import RandCropByPosNegLabeld, Transform

from tests.hostile import mutations as m
from tests.hostile.forge import sealed
from zcache import PersistentDataset
from zcache.encoding.payload import decode_item
from zcache.errors import EntryDamagedError, ZCacheWarning
from zcache.training.leaves import torch_leaf_codecs

N_MUTATIONS = 60
SHAPE = (1, 24, 26, 28)


class Made(Transform):
    """An image and its label, out of nothing."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(item["seed"])
        label = torch.zeros(SHAPE, dtype=torch.uint8)
        label[:, 8:15, 9:14, 7:19] = 1
        return {**item, "image": torch.from_numpy(rng.normal(0, 9, SHAPE).astype("f4")), "label": label}


def data_set(cache_dir: Path | None, **how: Any) -> PersistentDataset:
    crop = RandCropByPosNegLabeld(["image", "label"], "label", (8, 8, 8), num_samples=2)
    return PersistentDataset([{"seed": 5}], [Made(), crop], cache_dir, **how)


def sample(ds: PersistentDataset) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Every bit of the two crops of image and label that a seed gives."""
    ds.transform.set_random_state(seed=3)
    crops = [crop[k].as_tensor().numpy() for crop in ds[0] for k in ("image", "label")]
    return [(crop.dtype.str, crop.shape, crop.tobytes()) for crop in crops]


@pytest.fixture
def filled(tmp_path) -> PersistentDataset:
    ds = data_set(tmp_path)
    sample(ds)
    ds.flush()
    assert sample(data_set(tmp_path)) == sample(data_set(None))
    return ds


def files_of(cache_dir: Path) -> list[Path]:
    """The files of the entry that a reader of zcache opens, the index of voxels among them."""
    (entry,) = (p for p in (cache_dir / "cache.zarr").iterdir() if p.is_dir())
    documents = [p for p in entry.rglob("zarr.json") if b'"zcache"' in p.read_bytes()[:200]]
    return sorted([*documents, *(p for p in entry.rglob("*") if p.is_file() and p.name != "zarr.json")])


def test_crops_of_a_damaged_entry_are_the_crops_of_the_item(filled, tmp_path, tally):
    expected = sample(data_set(None))
    dice = m.SeededDice(0)
    noticed = 0
    assert len(files_of(tmp_path)) >= 3
    for i in range(N_MUTATIONS):
        files = files_of(tmp_path)
        path = files[i % len(files)]
        path.write_bytes(m.damaged(path.read_bytes(), dice))
        ds = data_set(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZCacheWarning)
            assert sample(ds) == expected
            ds.flush()
        noticed += ds.stats.damaged
        tally["damaged files: crop right"] += 1
    assert noticed > N_MUTATIONS // 3


def test_forged_trees_for_crops_are_samples_or_errors_of_the_crop_never_of_zcache(filled, tmp_path, tally):
    document_path = min((p for p in files_of(tmp_path) if p.name == "zarr.json"), key=lambda p: len(p.parts))
    original = document_path.read_bytes()
    for seed in range(150):
        dice = m.SeededDice(seed)
        document = json.loads(original)
        own = document["attributes"]["zcache"]
        own["payload"] = m.changed_document({"payload": own["payload"]}, dice).get("payload")
        document_path.write_bytes(sealed(document))
        ds = data_set(tmp_path, read_only=True)
        ds.transform.set_random_state(seed=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (error := error_of(ds)) is not None:
                assert raised_outside_of_zcache(error), repr(error)
        tally["forged payload trees"] += 1


def error_of(ds: PersistentDataset) -> Exception | None:
    try:
        ds[0]
    except Exception as e:  # noqa: BLE001 - what a transform makes of a forged item is not foreseen
        return e
    return None


def raised_outside_of_zcache(error: BaseException) -> bool:
    """Whether it was MONAI's or torch's code that could not work with the item, and not zcache's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/zcache/" not in trace.tb_frame.f_code.co_filename


def test_one_array_in_many_places_is_damage_for_crops_too(filled, tmp_path):
    document_path = min((p for p in files_of(tmp_path) if p.name == "zarr.json"), key=lambda p: len(p.parts))
    document = json.loads(document_path.read_bytes())
    payload = document["attributes"]["zcache"]["payload"]
    payload |= {f"k{i}": payload["image"] for i in range(50)}
    document_path.write_bytes(sealed(document))
    ds = data_set(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZCacheWarning)
        assert sample(ds) == sample(data_set(None))
    assert ds.stats.damaged == 1


@pytest.mark.parametrize(
    "shape", [["x"], [1, "x", 26, 28], ["x", 2, 3], [None, 1], [[1], 2, 3], [1.5, 2, 3], 7, {}, [-1, 2, 3]]
)
@pytest.mark.parametrize("key", ["image", "label"])
def test_a_shape_that_is_none_is_damage_before_an_index_of_voxels_is_looked_for(filled, tmp_path, key, shape):
    document_path = min((p for p in files_of(tmp_path) if p.name == "zarr.json"), key=lambda p: len(p.parts))
    document = json.loads(document_path.read_bytes())
    (node,) = document["attributes"]["zcache"]["payload"][key].values()
    node["data"]["shape"] = shape
    document_path.write_bytes(sealed(document))
    ds = data_set(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZCacheWarning)
        assert sample(ds) == sample(data_set(None))
    assert ds.stats.damaged == 1


def test_a_dict_with_a_tag_among_its_keys_is_no_tensor(filled, tmp_path):
    document_path = min((p for p in files_of(tmp_path) if p.name == "zarr.json"), key=lambda p: len(p.parts))
    document = json.loads(document_path.read_bytes())
    label = document["attributes"]["zcache"]["payload"]["label"]
    next(iter(label.values()))["data"]["shape"] = [1, 24, "", 28]
    label["x"] = 1
    document_path.write_bytes(sealed(document))
    ds = data_set(tmp_path, read_only=True)
    ds.transform.set_random_state(seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = error_of(ds)
    assert error is None or raised_outside_of_zcache(error), repr(error)


DEVICES = [
    "cuda", "cuda:7", "cpu:3", "mps", "xpu", "xla", "vulkan", "mkldnn", "opencl", "lazy", "ve", "fpga", "maia", "mtia",
    "ipu", "ort", "ideep", "hip", "hpu", "privateuseone", "privateuseone:3", "meta", "", "x",
    "cuda:99999999999", "cuda:-1",
]  # fmt: skip


def node(device: str) -> Any:
    return {"$tensor": {"data": {"dtype": "<f4", "shape": [1], "base64": "AAAAAA=="}, "device": device}}


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_of_any_device_is_on_the_cpu_or_damage(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zcache, and of torch where a name is out of date
        try:
            tensor = decode_item(node(device), {}.get, torch_leaf_codecs())
        except EntryDamagedError:
            return
    assert tensor.tolist() == [0.0]
