"""Items without torch: the same values as with it, plain types, nothing imported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Orientationd, Spacingd
from monai.utils import enums

import zcache
from tests.support import key, run_script, same_bits
from zcache.encoding.payload import encode_item
from zcache.encoding.places import array_places
from zcache.encoding.plain import UnknownValue, plain_item
from zcache.errors import EntryDamagedError
from zcache.inspection.values import scalars
from zcache.training.leaves import torch_leaf_codecs


def plain(item):
    encoded = encode_item(item, torch_leaf_codecs())
    arrays = {leaf.name: leaf.array for leaf in encoded.leaves}
    return plain_item(encoded.tree, lambda name: np.array(arrays[name]))


@pytest.mark.parametrize("kind", [enums.MetaKeys, enums.TraceKeys, enums.SpaceKeys])
def test_the_enums_of_monai_are_their_values(kind):
    for member in kind:
        assert plain(member) == member.value


def test_an_enum_that_nobody_imported_is_its_name():
    assert plain_item({"$enum": ["no.such.module", "Colour", "RED"]}, None) == "Colour.RED"


def test_tensors_are_arrays():
    values = {
        "f4": torch.arange(2000, dtype=torch.float32),
        "bf16": torch.linspace(-3, 3, 3000, dtype=torch.bfloat16),
        "small": torch.tensor(1.5, dtype=torch.bfloat16),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "meta": MetaTensor(torch.ones(1, 5), affine=torch.eye(4)),
    }
    found = plain(values)
    assert same_bits(found["f4"], values["f4"].numpy())
    assert same_bits(found["bf16"], values["bf16"].float().numpy())
    assert same_bits(found["small"], np.array(1.5, np.float32))
    assert (found["size"], found["dtype"], found["device"]) == ((1, 2), "torch.float16", "cpu")
    assert same_bits(found["meta"], np.ones((1, 5), np.float32))


def test_a_type_of_the_users_own_is_named():
    assert plain_item({"a": {"$mine": 1}}, None) == {"a": UnknownValue("$mine")}


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": 3},
        {"$metatensor": {"data": {"dtype": "<f4", "shape": [2], "base64": "!"}}},
        {"$ndarray": {"dtype": "|O", "shape": [2], "array": "x"}},
        {"$enum": [1]},
    ],
)
def test_what_is_malformed_is_damage(tree):
    with pytest.raises(EntryDamagedError):
        plain_item(tree, lambda _: np.zeros(2, np.float32))


def test_places():
    item = {"a": {"b": [np.zeros(3), {"c": torch.zeros(2000)}]}, "n": (1, np.zeros(4000, ">i2"))}
    found = array_places(encode_item(item, torch_leaf_codecs()).tree)
    assert [(p.place, p.kind, p.shape, p.dtype, p.name) for p in found] == [
        ("a.b[0]", "ndarray", (3,), "float64", ""),
        ("a.b[1].c", "tensor", (2000,), "float32", "a.b_1_.c" if found[1].name == "a.b_1_.c" else found[1].name),
        ("n[1]", "ndarray", (4000,), ">i2", found[2].name),
    ]
    assert scalars(encode_item(item, torch_leaf_codecs()).tree) == {"n[0]": "1"}


def test_a_training_and_a_look_without_torch_agree(tmp_path, volumes):
    keys = ["image", "label"]
    transforms = [
        LoadImaged(keys),
        EnsureChannelFirstd(keys),
        Orientationd(keys, "RAS", labels=None),
        Spacingd(keys, (2, 2, 2)),
    ]
    with zcache.PersistentDataset(volumes[:1], Compose(transforms), cache_dir=tmp_path / "cache") as ds:
        expected = ds[0]
    [entry] = zcache.open_cache(tmp_path / "cache").values()
    found, real = entry.load(), entry.load(torch=True)
    assert list(found) == list(expected)
    for name in keys:
        assert type(found[name]) is np.ndarray
        assert same_bits(found[name], expected[name].numpy())
        assert same_bits(entry.read(name), found[name])
        assert type(real[name]) is MetaTensor
        assert torch.equal(real[name].affine, expected[name].affine)
        meta = entry.meta[name]
        assert np.array_equal(meta["affine"], expected[name].affine.numpy())
        assert meta["filename_or_obj"] == volumes[0][name]
        assert meta["space"] == "RAS"
        done = meta["applied_operations"]
        assert [step["class"] for step in done] == [
            str(s[enums.TraceKeys.CLASS_NAME]) for s in expected[name].applied_operations
        ]
        assert all(type(k) is str for k in meta)
    script = """
        import sys, zcache
        [entry] = zcache.open_cache(sys.argv[1]).values()
        entry.load(), entry.meta, repr(entry), entry._repr_html_(), entry.info, entry.scalars
        print(sorted({"torch", "monai", "matplotlib", "zarr", "pandas", "rich", "typer"} & set(sys.modules)))
    """
    assert run_script(script, tmp_path / "cache", folder=tmp_path) == "[]"


def test_a_box(tmp_path):
    array = np.arange(30_000, dtype=np.float32).reshape(10, 50, 60)
    with zcache.Cache(tmp_path / "cache", leaf_codecs=torch_leaf_codecs()) as cache:
        cache.put(
            key(1),
            {"x": array, "b": torch.from_numpy(array).bfloat16(), "t": np.array(["a", "b"] * 5000), "s": array[0, 0]},
        )
    entry = zcache.open_cache(tmp_path / "cache")[key(1)]
    for region in [
        (slice(2, 5), slice(None), (7, 9)),
        ((2, 5), (0, 50), (7, 9)),
        (slice(2, 5), slice(0, 99), slice(7, 9)),
    ]:
        assert same_bits(entry.read("x", region), array[2:5, :, 7:9])
    assert same_bits(entry.read("x", (slice(-1, None),)), array[-1:])
    assert same_bits(entry.read("b", [(0, 1)]), torch.from_numpy(array[:1]).bfloat16().float().numpy())
    assert entry.read("t", [(1, 3)]).tolist() == ["b", "a"]
    assert same_bits(entry.read("s", [(1, 3)]), array[0, 0, 1:3])
    with pytest.raises(IndexError):
        entry.read("x", [(0, 11)])
    with pytest.raises(IndexError, match="has 4 axes"):
        entry.read("x", [slice(None)] * 4)
    with pytest.raises(IndexError, match="no steps"):
        entry.read("x", [slice(0, 4, 2)])
    with pytest.raises(zcache.EntryNotFoundError, match="no array 'y': it has 'x', 'b', 't', 's'"):
        entry.read("y")
