from __future__ import annotations

import json
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.utils import MetaKeys, SpaceKeys, TraceKeys

from tests.strategies import SHAPES, assert_same, trees
from zcache.cache import Cache
from zcache.encoding.payload import LeafCodec, decode_item, encode_item
from zcache.errors import EntryDamagedError, UnstorableError, ZCacheWarning
from zcache.training import leaves
from zcache.training.leaves import torch_leaf_codecs

KEY = "0" * 32
ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPES = [d for d in ALL_DTYPES if not str(d).startswith(("torch.qu", "torch.qi"))]
COMMON = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint16, torch.complex64, torch.float8_e5m2]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all, as far as the dtype allows."""
    rng = np.random.default_rng(seed)
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    raw = rng.integers(0, 2 if dtype is torch.bool else 256, n_bytes, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def round_trip(item, *, inline_max_bytes=4096, track_meta=True):
    codecs = torch_leaf_codecs(track_meta=track_meta)
    encoded = encode_item(item, codecs, inline_max_bytes=inline_max_bytes)
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    arrays = {leaf.name: leaf.array for leaf in encoded.snapshot().leaves}
    return decode_item(tree, lambda name: arrays[name].copy(), codecs)


def through_disk(item, cache_dir, **kwargs):
    """Return the item as a miss, an in-flight hit if the writer is slow enough, and a hit."""
    with Cache(cache_dir, leaf_codecs=torch_leaf_codecs(), on_error="raise", **kwargs) as cache:
        miss = cache.put(KEY, item)
        cache.flush()
        return miss, cache.get(KEY)


def assert_same_meta(a: MetaTensor, b: MetaTensor) -> None:
    """As `assert_same`, and whatever else MONAI keeps in a MetaTensor."""
    assert_same(a, b)
    assert vars(a).keys() == vars(b).keys()
    assert getattr(a, "_spatial_ndim", None) == getattr(b, "_spatial_ndim", None)
    assert b.pending_operations == []


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 4, 5), (2, 1, 3, 1, 2)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype, shape):
    tensor = random_tensor(dtype, shape)
    for inline_max_bytes in (0, 4096):
        assert_same(tensor, round_trip(tensor, inline_max_bytes=inline_max_bytes))


def test_every_dtype_survives_the_disk(tmp_path):
    item = {str(d): random_tensor(d, (3, 40, 41), seed) for seed, d in enumerate(DTYPES)}
    miss, hit = through_disk(item, tmp_path)
    assert_same(item, miss)
    assert_same(item, hit)


def test_nan_payloads_and_negative_zeros_of_tensors_are_kept(tmp_path):
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001, -1, 0], dtype=torch.int32).repeat(2000)
    half = torch.tensor([0x7FC1, -0x8000, 0], dtype=torch.int16).repeat(3000)
    item = [bits.view(torch.float32), half.view(torch.bfloat16)]
    for got in through_disk(item, tmp_path):
        assert torch.equal(got[0].view(torch.int32), bits)
        assert torch.equal(got[1].view(torch.int16), half)


@pytest.mark.parametrize("dtype", COMMON, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.permute(2, 0, 1),
        lambda t: t[::2, :, 1:],
        lambda t: t[:, 1:2].expand(-1, 7, -1),
        lambda t: t.reshape(-1)[5],
        lambda t: torch.as_strided(t, (3, 3), (1, 2), 4),
    ],
    ids=["permuted", "sliced", "expanded", "0-d view", "overlapping"],
)
def test_views_come_back_with_their_values_and_contiguous(dtype, view):
    tensor = view(random_tensor(dtype, (6, 8, 10)))
    for inline_max_bytes in (0, 4096):
        back = round_trip(tensor, inline_max_bytes=inline_max_bytes)
        assert_same(tensor, back)
        assert back.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugates_and_negatives_are_resolved(dtype):
    tensor = torch.randn(7, 9, dtype=dtype)
    conjugate, negative = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    for view in (conjugate, negative):
        back = round_trip(view)
        assert_same(view, back)
        assert not back.is_conj()
        assert not back.is_neg()


def test_case_38_tensors_with_grad_come_back_detached(tmp_path):
    weight = torch.randn(3000, requires_grad=True)
    item = {"leaf": weight, "result": weight * 2, "meta": MetaTensor(weight * 3)}
    for got in through_disk(item, tmp_path):
        assert not any(t.requires_grad for t in got.values())
        assert_same({k: v.detach() for k, v in item.items()}, got)
    assert weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*uantize")
def test_quantised_tensors_are_refused_by_path():
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(UnstorableError, match=r"\['a'\]\[1\].*quint8.*dequantize"):
        round_trip({"a": [0, tensor]})


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*prototype:UserWarning")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.ones(3, device="meta"), "on meta"),
        (lambda: torch.nn.Parameter(torch.ones(3)), "Parameter"),
    ],
    ids=["coo", "csr", "nested", "meta device", "parameter"],
)
def test_tensors_without_dense_values_are_refused_by_path(make, what):
    with pytest.raises(UnstorableError) as e:
        round_trip({"a": (make(),)})
    assert "['a'][0]" in str(e.value)
    assert what in str(e.value)


def test_what_a_tensor_may_not_be_is_refused_within_a_metatensor_too():
    meta = MetaTensor(torch.ones(2))
    meta.meta["extra"] = torch.eye(3).to_sparse()
    with pytest.raises(UnstorableError, match=r"\['a'\]\.meta\['extra'\]"):
        round_trip({"a": meta})


def test_a_metatensor_comes_back_with_everything(tmp_path):
    image = MetaTensor(
        random_tensor(torch.int16, (1, 20, 21, 22)),
        affine=torch.tensor(np.random.default_rng(0).normal(size=(4, 4))),
        meta={
            "filename_or_obj": "/data/a.nii.gz",
            MetaKeys.SPATIAL_SHAPE: np.array([20, 21, 22], np.int16),
            MetaKeys.SPACE: SpaceKeys.LPS,
            "kind": SpaceKeys.RAS,
            7: {"deep": (torch.arange(5), [np.float32(1.5), None])},
        },
        applied_operations=[
            {
                TraceKeys.CLASS_NAME: "Rotate90",
                TraceKeys.ID: TraceKeys.NONE,
                TraceKeys.ORIG_SIZE: (20, 21, 22),
                TraceKeys.EXTRA_INFO: {"axes": [0, 1], "k": 3, "matrix": torch.eye(4, dtype=torch.float64)},
                "lazy": False,
                "nested": MetaTensor(torch.rand(1, 3, 3)),
            }
        ],
    )
    for got in (*through_disk({"image": image}, tmp_path), round_trip({"image": image})):
        assert_same_meta(image, got["image"])
        assert list(map(type, got["image"].meta)) == list(map(type, image.meta))
        assert got["image"].meta["kind"] is SpaceKeys.RAS
        assert type(got["image"].applied_operations[0]["nested"]) is MetaTensor


def test_a_batch_of_metatensors_comes_back():
    batch = MetaTensor(torch.rand(2, 1, 4, 5, 6), affine=torch.eye(4).repeat(2, 1, 1))
    batch.is_batch = True
    batch.applied_operations = [[{"class": "A"}], [{"class": "B"}]]
    back = round_trip(batch)
    assert_same_meta(batch, back)
    assert back.is_batch is True
    assert_same(batch[1], back[1])


def test_a_metatensor_without_affine_and_space_gets_none():
    image = MetaTensor(torch.rand(1, 3, 3))
    image._meta = {"only": "this"}
    back = round_trip(image)
    assert_same_meta(image, back)
    assert back.meta == {"only": "this"}
    del image.__dict__["_meta"], image.__dict__["_applied_operations"]
    assert round_trip(image).shape == (1, 3, 3)


def test_a_two_dimensional_metatensor_keeps_its_number_of_spatial_dimensions():
    image = MetaTensor(torch.rand(3, 8, 9), affine=torch.eye(3))
    assert image.spatial_ndim == 2
    back = round_trip(image)
    assert_same_meta(image, back)
    assert back.spatial_ndim == 2
    assert back.pixdim.shape == (2,)


def test_a_metatensor_that_came_back_works_like_any_other():
    image = MetaTensor(torch.rand(1, 4, 5, 6), affine=torch.diag(torch.tensor([2.0, 3, 4, 1])))
    back = round_trip(image)
    assert_same_meta(image[:, 1:3] + 1, back[:, 1:3] + 1)
    assert_same_meta(image.clone(), back.clone())
    assert repr(image) == repr(back)
    assert_same(image.pixdim, back.pixdim)


def test_pending_lazy_operations_are_refused():
    image = MetaTensor(torch.rand(1, 4, 4))
    image.push_pending_operation({"lazy_affine": torch.eye(3)})
    with pytest.raises(UnstorableError, match=r"\['image'\] has pending lazy operations"):
        round_trip({"image": image})


def test_types_of_torch_that_are_no_tensors_come_back():
    item = [torch.Size([3, 0, 4]), torch.Size([]), torch.float32, torch.bfloat16, torch.device("cpu")]
    item += [torch.device("cuda", 1), {torch.int8: torch.float8_e4m3fn}]
    back = round_trip(item)
    assert_same(item, back)
    assert back[0].numel() == 0
    assert back[2] is torch.float32


def test_track_meta_false_gives_plain_tensors_and_stores_the_same(tmp_path):
    item = {"image": MetaTensor(torch.rand(1, 30, 31, 9), affine=2 * torch.eye(4)), "plain": torch.ones(3)}
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs(track_meta=False)) as cache:
        miss = cache.put(KEY, item)
        inflight_or_hit = cache.get(KEY)
        cache.flush()
        hit = cache.get(KEY)
    for got in (miss, inflight_or_hit, hit):
        assert_same({"image": item["image"].as_tensor(), "plain": item["plain"]}, got)
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs()) as cache:
        assert_same(item, cache.get(KEY))


def test_what_comes_back_is_not_shared(tmp_path):
    image = MetaTensor(torch.rand(1, 20, 20, 20))
    image.applied_operations.append({"extra": torch.zeros(3)})
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs()) as cache:
        got = [cache.put(KEY, image), cache.get(KEY)]
        cache.flush()
        got += [cache.get(KEY), cache.get(KEY), image]
    assert len({t.data_ptr() for t in got}) == len(got)
    assert len({id(t.meta) for t in got}) == len(got)
    assert len({t.applied_operations[0]["extra"].data_ptr() for t in got}) == len(got)


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype = draw(
        st.sampled_from(
            [d for d in DTYPES if not str(d).startswith(("torch.bits", "torch.int", "torch.uint"))] + COMMON
        )
    )
    tensor = random_tensor(dtype, draw(st.sampled_from(SHAPES)), draw(st.integers(0, 2**32 - 1)))
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


@st.composite
def meta_tensors(draw) -> MetaTensor:
    tensor = random_tensor(
        draw(st.sampled_from(COMMON)), draw(st.sampled_from([(1,), (1, 3, 4), (2, 3, 4, 5), (1, 0, 2)]))
    )
    extras = trees(tensors())
    image = MetaTensor(tensor, affine=torch.eye(4) * draw(st.floats(0.5, 2)))
    image.meta.update(draw(st.dictionaries(st.one_of(st.text(), st.sampled_from(list(MetaKeys))), extras, max_size=3)))
    if not isinstance(image.meta.get("affine"), torch.Tensor) or not isinstance(image.meta["affine"], torch.Tensor):
        image.meta["affine"] = torch.eye(4)
    image.applied_operations = draw(st.lists(st.dictionaries(st.text(), extras, max_size=3), max_size=3))
    return image


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(trees(tensors(), meta_tensors()), st.sampled_from([0, 64, 4096]))
def test_any_tree_with_tensors_comes_back_with_its_types_and_bits(item, inline_max_bytes):
    assert_same(item, round_trip(item, inline_max_bytes=inline_max_bytes))


def _encode_as_if_on(device):
    def encode(value, encoder, path):
        return {**leaves._encode_tensor(value, encoder, path), "device": device}

    return encode


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens on a machine without CUDA")
def test_case_38_a_tensor_of_a_missing_device_comes_back_on_the_cpu_with_one_warning(tmp_path, heard):
    leaves._warned_devices.clear()
    codecs = [
        *torch_leaf_codecs(),
        LeafCodec("$tensor", (torch.Tensor,), _encode_as_if_on("cuda:0"), leaves.decode_tensor),
    ]
    item = {"a": torch.rand(3000), "b": [torch.rand(3, dtype=torch.float64)] * 3}
    with Cache(tmp_path, leaf_codecs=codecs, on_error="raise") as cache:
        got = [cache.put(KEY, item)]
        cache.flush()
        got += [cache.get(KEY), cache.get(KEY)]
    assert '"device":"cuda:0"' in (tmp_path / "cache.zarr" / KEY / "zarr.json").read_text()
    for each in got:
        assert_same(item, each)
    said = [str(w.message) for w in heard if issubclass(w.category, ZCacheWarning)]
    assert len(said) == 1
    assert "cuda:0" in said[0]
    assert "stay on the CPU" in said[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_case_38_a_tensor_of_a_device_that_is_there_goes_back_to_it(tmp_path):
    item = {
        "image": MetaTensor(torch.rand(1, 20, 20, 20, device="cuda")),
        "half": torch.rand(9, device="cuda").bfloat16(),
    }
    for got in through_disk(item, tmp_path):
        assert_same(item, got)
        assert got["image"].device.type == "cuda"
        assert got["image"].affine.device == item["image"].affine.device


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "no such dtype"},
        {"dtype": "float64"},
        {"dtype": 3},
        {"dtype": "quint4x2", "data": {"dtype": "|u1", "shape": [3], "base64": "AAAA"}},
        {"device": "no such device"},
        {"device": 3.5},
        {"device": "meta"},
        {"data": {"dtype": "<f4", "shape": [3], "base64": "AAAA"}},
        {"data": {"dtype": "<U1", "shape": [1], "base64": "AAAAAA=="}},
        {"data": None},
    ],
    ids=str,
)
def test_a_malformed_tensor_is_damage_and_never_another_error(damage):
    codecs = torch_leaf_codecs()
    tree = encode_item(torch.zeros(3), codecs).tree
    tree["$tensor"].update(damage)
    with pytest.raises(EntryDamagedError):
        decode_item(tree, {}.__getitem__, codecs)


@pytest.mark.parametrize(
    "tree",
    [
        {"$metatensor": {"data": {"dtype": "<f4", "shape": [1], "base64": "AAAAAA=="}}},
        {"$metatensor": 3},
        {"$torch.size": "abc"},
        {"$torch.size": [1.5]},
        {"$torch.dtype": "nonsense"},
        {"$torch.dtype": []},
        {"$torch.device": "nonsense"},
        {"$torch.device": [1]},
    ],
    ids=str,
)
def test_malformed_values_of_torch_are_damage(tree):
    with pytest.raises(EntryDamagedError):
        decode_item(tree, {}.__getitem__, torch_leaf_codecs())


def test_the_codecs_can_be_pickled_to_a_worker(tmp_path):
    item = {"image": MetaTensor(torch.rand(1, 20, 20, 20))}
    with Cache(tmp_path, leaf_codecs=torch_leaf_codecs()) as cache:
        cache.put(KEY, item)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(item, pickle.loads(pickle.dumps(cache)).get(KEY))
