"""The readers of docs/format.md, which share no code with zcache, read every bit that zcache wrote."""

from __future__ import annotations

import enum
import importlib
import json
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor

from tests.strategies import CORE, OTHER, arrays, assert_same, hashables, random_array, scalars
from tests.support import REPOSITORY, key, same_bits, shard_file, write
from zcache import Cache
from zcache.encoding import layout
from zcache.encoding.layout import DOCUMENT
from zcache.encoding.narrowing import Precision
from zcache.storage.store import Store
from zcache.storage.writer import WriteSettings
from zcache.training.leaves import torch_leaf_codecs

EXAMPLES = REPOSITORY / "docs/examples"
SCRIPT = EXAMPLES / "read_entry.py"
sys.path.insert(0, str(EXAMPLES))  # as for who runs the scripts
try:
    read_arrays = importlib.import_module("read_arrays")
    read_entry = importlib.import_module("read_entry")
finally:
    sys.path.remove(str(EXAMPLES))

RNG = np.random.default_rng(0)
SHAPE = (1, 21, 33, 40)
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0], "f4")


def _floats(dtype: str) -> np.ndarray:
    return RNG.normal(0, 100, SHAPE).astype(dtype)


def _windowed(dtype: str, levels: int) -> np.ndarray:
    found = (RNG.integers(0, levels, SHAPE) / (levels - 1)).astype(dtype)
    found.reshape(-1)[: SPECIAL.size] = SPECIAL
    return found


def _with_specials(array: np.ndarray) -> np.ndarray:
    array.reshape(-1)[-SPECIAL.size :] = SPECIAL
    return array


# One array for each way to be narrowed: name, array, precision, kind, type of the codes.
NARROWED = [
    ("floats", _floats("f4"), "lossless", "identity", "<f4"),
    ("integral floats", np.rint(_floats("f4")) + 0.0, "lossless", "cast", "<i2"),
    ("labels", RNG.integers(0, 5, SHAPE).astype("i8"), "lossless", "cast", "|u1"),
    ("float64 that are float32", _floats("f4").astype("f8"), "lossless", "cast", "<f4"),
    ("a windowed CT", _windowed("f4", 200), "lossless", "table", "|u1"),
    ("many levels", _windowed("f8", 3000), "lossless", "table", "<u2"),
    ("an absolute error", _with_specials(_floats("f4")), "0.01", "affine", "<u2"),
    ("a large error, of float64", _with_specials(_floats("f8")), "5.0", "affine", "|u1"),
    ("uint8", _with_specials(_floats("f4")), "uint8", "affine", "|u1"),
    ("uint16", _with_specials(_floats("f4")), "uint16", "affine", "<u2"),
    ("float16", _floats("f4"), "float16", "cast", "<f2"),
    ("complex", _floats("f4").astype("c8"), "lossless", "identity", "<c8"),
    ("a mask", RNG.integers(0, 2, SHAPE).astype(bool), "lossless", "identity", "|b1"),
]


@pytest.mark.parametrize(
    ("array", "precision", "kind", "codes"), [pytest.param(*row[1:], id=row[0]) for row in NARROWED]
)
def test_every_narrowing(tmp_path, array, precision, kind, codes):
    precision = float(precision) if precision[0].isdigit() else precision
    with Cache(tmp_path, precision=precision, chunks=(8, 9, 11)) as cache:
        cache.put(key(1), {"image": array}, {"source": ["a.nii.gz"]})
        cache.flush()
        expected = cache.get(key(1))["image"]
    item, about = read_entry.read_entry(tmp_path, key(1))
    assert same_bits(item["image"], expected)
    assert set(about) == {"created", "source"}
    record = Cache(tmp_path, read_only=True).using(key(1), lambda e: e.record.arrays["image"], None)
    assert (record.narrowing.kind, record.narrowing.code_dtype.str) == (kind, codes)


@pytest.mark.parametrize("cname", ["lz4", "lz4hc", "blosclz", "zstd", "zlib"])
def test_every_compressor(tmp_path, cname):
    array = RNG.normal(0, 9, SHAPE).astype("f4")
    with Cache(tmp_path, codec=cname) as cache:
        cache.put(key(1), [array])
    assert same_bits(read_entry.read_entry(tmp_path, key(1))[0][0], array)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", CORE + OTHER)
def test_every_dtype_inline_and_as_an_array(tmp_path, dtype, order):
    swapped = np.dtype(dtype).newbyteorder(order)
    item = {
        n: random_array(dtype, (n,), 0).astype(swapped)
        if dtype[0] in "USMmgG"
        else random_array(dtype, (n,), 0).view(swapped)
        for n in (3, 5000)
    }
    with Cache(tmp_path) as cache:
        cache.put(key(1), item)
    assert_same(read_entry.read_entry(tmp_path, key(1))[0], item)


_no_enums = [values.filter(lambda v: not isinstance(v, enum.Enum)) for values in (scalars, hashables)]
_items = st.recursive(
    st.one_of(_no_enums[0], arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(_no_enums[1], inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$dict", "a"]), inner, max_size=2),
        st.sets(_no_enums[1], max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(item=_items)
def test_every_item(tmp_path, item):
    name = uuid.uuid4().hex
    with Cache(tmp_path, on_error="raise") as cache:
        stored = cache.put(name, item)
    assert_same(read_entry.read_entry(tmp_path, name)[0], stored)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=arrays().filter(lambda a: a.dtype.kind == "f" and a.itemsize <= 8 and a.size), bound=st.floats(1e-3, 9))
def test_every_float_array_under_a_precision(tmp_path, array, bound):
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
    store = Store(tmp_path)
    write(store, key(0), {"image": array}, WriteSettings(precision=Precision.parse(bound)), replace=True)
    folder = tmp_path / "cache.zarr" / key(0)
    document = json.loads((folder / DOCUMENT).read_bytes())
    described = document["attributes"]["zcache"]["arrays"]["image"]
    codes = read_arrays.codes(folder / "image", document["consolidated_metadata"]["metadata"]["image"], described)
    with Cache(tmp_path, read_only=True) as cache:
        expected = cache.get_region(key(0), "image", tuple((0, n) for n in array.shape))
    assert same_bits(read_arrays.values(codes, described), expected)


def test_metatensors_and_tensors(tmp_path):
    image = MetaTensor(
        torch.randn(1, 20, 21, 22), affine=torch.diag(torch.tensor([2.0, 2, 3, 1])), meta={"filename_or_obj": "a"}
    )
    item = {"image": image, "label": torch.randint(0, 3, (1, 20, 21, 22)), "half": torch.ones(3, dtype=torch.bfloat16)}
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs()) as cache:
        cache.put(key(1), item)
    found, _ = read_entry.read_entry(tmp_path, key(1))
    assert same_bits(found["image"]["data"], image.numpy())
    assert same_bits(found["label"], item["label"].numpy())
    assert found["half"].tolist() == [0x3F80] * 3
    assert (tmp_path / "cache.zarr" / key(1) / "labels/label/0/c/0/0/0/0").is_file()  # an OME label lies elsewhere
    affine = found["image"]["meta"]["monai.utils.enums", "MetaKeys", "AFFINE"]
    assert np.array_equal(affine, image.affine.numpy())
    assert found["image"]["meta"]["filename_or_obj"] == "a"


@pytest.mark.parametrize("at", [0, 100, -1, -10, -40])
@pytest.mark.parametrize("which", ["document", "shard"])
def test_damage_is_noticed(tmp_path, which, at):
    with Cache(tmp_path) as cache:
        cache.put(key(1), {"image": _floats("f4")})
    store = Store(tmp_path)
    path = store.entry_path(key(1)) / DOCUMENT if which == "document" else shard_file(store, key(1), "image", 4)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|not an entry|another"):
        read_entry.read_entry(tmp_path, key(1))


def test_as_a_script(tmp_path):
    with Cache(tmp_path) as cache:
        cache.put(key(1), {"age": 63, "small": np.arange(3)}, {"source": ["a.nii.gz"]})
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, key(1)], capture_output=True, text=True, check=True)
    assert '"a.nii.gz"' in done.stdout
    assert "{'age': 63, 'small': array([0, 1, 2])}" in done.stdout


def test_the_page_quotes_the_documents_as_they_are():
    page = (REPOSITORY / "docs/format.md").read_text("utf-8").splitlines()
    assert read_arrays.HEAD == layout._HEAD
    assert layout._HEAD.decode() in page
    assert layout.root_document().decode() in page


def test_it_shares_no_code_with_what_it_checks():
    imports = [line.split()[1] for line in Path(SCRIPT).read_text().splitlines() if line.startswith(("import", "from"))]
    assert {name.partition(".")[0] for name in imports}.isdisjoint({"zcache", "zarr", "torch", "monai"})
