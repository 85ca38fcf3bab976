from __future__ import annotations

import enum
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import Colour, Mode, assert_same, random_array, trees
from zcache.encoding.payload import decode_item, encode_item
from zcache.errors import EntryDamagedError, UnstorableError
from zcache.training.leaves import torch_leaf_codecs


class Flags(enum.Flag):
    A = 1
    B = 2


def round_trip(item, **kwargs):
    encoded = encode_item(item, **kwargs)
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    arrays = {leaf.name: leaf.array for leaf in encoded.snapshot().leaves}
    return decode_item(tree, lambda name: arrays[name].copy())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.sampled_from([0, 16, 4096]))
def test_any_tree_comes_back_with_its_types_and_bits(item, inline_max_bytes):
    assert_same(item, round_trip(item, inline_max_bytes=inline_max_bytes))


def test_plain_json_stays_plain():
    item = {"a": [1, 2.5, None, True, "x"], "b": {"c": -0.0}}
    assert encode_item(item).tree == item


def test_small_arrays_stay_in_the_tree_and_large_ones_get_names():
    item = {"image": np.zeros(4097, "u1"), "affine": np.eye(4), "deep": [{"mask": np.zeros((9, 999), "i2")}]}
    encoded = encode_item(item)
    assert {leaf.name: leaf.array.nbytes for leaf in encoded.leaves} == {"image": 4097, "deep.0.mask": 17982}
    assert encoded.tree["affine"]["$ndarray"]["shape"] == [4, 4]


@pytest.mark.parametrize(
    ("item", "path", "kind"),
    [
        ({"a": [0, object()]}, "['a'][1]", "builtins.object"),
        ({"meta": {"header": subprocess.Popen}}, "['meta']['header']", "builtins.type"),
        ({"x": np.array([None, 1], object)}, "['x']", "object"),
        ({"x": np.zeros(2, [("a", "i4")])}, "['x']", "structured"),
        ([np.zeros(2, [("a", "i4")])[0]], "[0]", "numpy.void"),
        ([Flags.A | Flags.B], "[0]", "combination of flags"),
    ],
)
def test_what_cannot_be_stored_is_named_by_path_and_type(item, path, kind):
    with pytest.raises(UnstorableError) as e:
        encode_item(item)
    assert path in str(e.value)
    assert kind in str(e.value)


def test_subclasses_are_other_types():
    class MyDict(dict):
        pass

    for item in (MyDict(a=1), type("MyInt", (int,), {})(3), type("MyStr", (str,), {})("a")):
        with pytest.raises(UnstorableError):
            encode_item([item])


def test_a_container_inside_itself_is_refused():
    item = []
    item.append({"again": item})
    with pytest.raises(UnstorableError, match="contains itself"):
        encode_item(item)


def test_deep_nesting_is_refused_clearly():
    item = []
    for _ in range(1000):
        item = [item]
    with pytest.raises(UnstorableError, match="levels deep"):
        encode_item(item)


def test_the_same_object_twice_is_no_cycle():
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_the_snapshot_is_private():
    array = np.arange(9999.0)
    encoded = encode_item({"x": array}).snapshot()
    array[:] = 0
    np.testing.assert_array_equal(encoded.leaves[0].array, np.arange(9999.0))


@pytest.mark.parametrize(
    "tree",
    [
        {"$nonsense": 1},
        {"$tuple": 3},
        {"$bytes": "!!"},
        {"$dict": [[1]]},
        {"$dict": [[{"$set": []}, 1]]},
        {"$ndarray": {"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}},
        {"$ndarray": {"dtype": "<f4", "shape": [3], "base64": "AAAA"}},
        {"$ndarray": {"dtype": "<f4", "shape": [-1], "base64": ""}},
        {"$ndarray": {"dtype": [["a", "O"]], "shape": [1], "base64": ""}},
        {"$ndarray": {"array": "missing", "dtype": "<f4", "shape": [1]}},
        {"$enum": ["os", "system", "x"]},
        {"$enum": ["antigravity", "fly", "x"]},
        {"$enum": ["tests.strategies", "Colour", "GREEN"]},
        {"$path": ["nonsense", "x"]},
        {"$dtype": "complex nonsense"},
    ],
)
def test_malformed_trees_are_damage(tree):
    with pytest.raises(EntryDamagedError):
        decode_item(tree, {}.__getitem__)


def test_no_module_is_imported_for_an_enum():
    code = (
        "import sys\n"
        "from zcache.encoding.payload import decode_item\n"
        "from zcache.errors import EntryDamagedError\n"
        "try: decode_item({'$enum': ['antigravity', 'X', 'y']}, {}.get)\n"
        "except EntryDamagedError: print('antigravity' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_enums_come_back_as_themselves():
    item = {Mode.NEAREST: Colour.RED, "v": Colour.BLUE}
    back = round_trip(item)
    assert next(iter(back)) is Mode.NEAREST
    assert back["nearest"] is Colour.RED


@pytest.mark.parametrize("dtype", [">f4", ">c16", ">i2", ">U3", ">M8[s]"])
def test_byte_order_survives(dtype):
    array = random_array(dtype, (3, 5), 1)
    assert_same(array, round_trip(array))
    assert_same(array, round_trip(array, inline_max_bytes=0))


def test_case_12_signalling_nans_keep_their_payload_in_either_byte_order():
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000], "<u4")
    for array in (bits.view("<f4"), bits.astype(">u4").view(">f4")):
        back = round_trip([array, array[0]])
        assert back[0].tobytes() == array.tobytes()
        assert back[1].tobytes() == array[0].tobytes()


def test_memory_is_handed_on_only_where_nothing_else_uses_it(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(2000))
    base = np.zeros(6000)
    locked = np.zeros(2000)
    locked.flags.writeable = False
    item = {
        "own": np.zeros(2000),
        "fortran": np.asfortranarray(np.zeros((40, 50))),
        "view": base[:2000],
        "buffer": np.frombuffer(bytearray(16000)),
        "map": np.load(tmp_path / "x.npy", mmap_mode="c"),
        "locked": locked,
        "tensor": torch.zeros(2000),
        "whole": (shared := torch.zeros(4000)),
        "half": shared[1000:3000],
        "foreign order": np.zeros(2000, ">f8"),
    }
    encoded = encode_item(item, torch_leaf_codecs())
    assert encoded.disjoint() == {"own", "tensor"}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=6))
def test_disjoint_arrays_are_those_that_share_no_byte(spans):
    buffer = torch.zeros(100, dtype=torch.uint8)
    item = [buffer[start : start + n] for start, n in spans]
    encoded = encode_item(item, torch_leaf_codecs(), inline_max_bytes=0)
    arrays = {leaf.name: leaf.array for leaf in encoded.leaves}
    expected = {
        name
        for name, array in arrays.items()
        if not any(np.shares_memory(array, other) for rest, other in arrays.items() if rest != name)
    }
    assert encoded.disjoint() == expected
