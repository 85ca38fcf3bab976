"""How tensors, MetaTensors and other values of torch are written into an entry and read back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from zcache.encoding.payload import Decoder, Encoder, Json, LeafCodec
from zcache.errors import EntryDamagedError, UnstorableError
from zcache.troubles import warn_caller

__all__ = ["decode_tensor", "torch_leaf_codecs", "with_dtype", "without_meta"]

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUANTISED = "torch.q"

_warned_devices: set[torch.device] = set()


def decode_tensor(node: Json, decoder: Decoder) -> torch.Tensor:
    """Return the tensor of a node, its bits read."""
    array = decoder.array(node["data"])
    tensor = with_dtype(torch.from_numpy(np.atleast_1d(array)), node).reshape(array.shape)
    return _on_device(tensor, _decode_device(node["device"], decoder)) if "device" in node else tensor


def with_dtype(tensor: torch.Tensor, node: Json) -> torch.Tensor:
    """Return a tensor's bits as the dtype that its node names, if numpy has no such dtype."""
    if "dtype" not in node:
        return tensor
    dtype = _DTYPES[node["dtype"]]
    if dtype.itemsize != tensor.element_size():
        raise EntryDamagedError(f"the entry holds {tensor.dtype} bits for a tensor of {dtype}")
    if str(dtype).startswith(_QUANTISED):
        raise EntryDamagedError(f"the entry holds a tensor of {dtype}, which no entry may hold")
    return tensor.view(dtype)


def torch_leaf_codecs(
    *, track_meta: bool = True, decode: Callable[[Json, Decoder], torch.Tensor] = decode_tensor
) -> tuple[LeafCodec, ...]:
    """Return the codecs of torch's and MONAI's types.

    They are module-level functions throughout, so that a cache can be pickled to a worker process.

    Tensors are stored detached, from a CPU copy, and go back to the device they were on where it exists. Sparse and
    quantised tensors are refused.

    Parameters
    ----------
    track_meta : bool
        If false, MetaTensors come back as plain tensors. What is stored is the same.
    decode : callable
        ``decode(node, decoder)`` makes the tensor of a node.
    """
    return (
        LeafCodec("$tensor", (torch.Tensor,), _encode_tensor, decode),
        LeafCodec("$metatensor", (MetaTensor,), _encode_meta, partial(_decode_meta, decode) if track_meta else decode),
        LeafCodec("$torch.size", (torch.Size,), _encode_size, _decode_size),
        LeafCodec("$torch.dtype", (torch.dtype,), _encode_dtype, _decode_dtype),
        LeafCodec("$torch.device", (torch.device,), _encode_device, _decode_device),
    )


def without_meta(value: Any) -> Any:
    """Return an item with its MetaTensors, in dicts, lists and tuples, as plain tensors of the same memory."""
    if isinstance(value, MetaTensor):
        return value.as_tensor()
    if type(value) is dict:
        return {k: without_meta(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_meta(v) for v in value)
    return value


def _encode_tensor(value: torch.Tensor, encoder: Encoder, path: str) -> Json:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta":
        kind = "nested" if value.is_nested else value.layout
        raise UnstorableError(
            f"{path or 'the item'} is a {kind} tensor of {value.dtype} on {value.device}, "
            "which a cache entry cannot hold: convert it to a dense tensor, with to_dense() or dequantize()"
        )
    data = value.detach()
    node: dict[str, Json] = {}
    if data.device.type != "cpu":
        node["device"] = str(data.device)
        data = data.cpu()
    if data.is_shared():  # type: ignore[no-untyped-call]
        data = data.clone()  # memory that other processes see is not the caller's alone
    return {**_encode_bits(data.resolve_conj().resolve_neg(), encoder, path), **node}


def _encode_bits(data: torch.Tensor, encoder: Encoder, path: str) -> dict[str, Json]:
    try:
        return {"data": encoder.array(data.numpy(), path)}
    except TypeError:
        # numpy has no such dtype (bfloat16, float8, complex32): keep the bits as integers.
        bits = _BITS[data.element_size()]
        array = (data.contiguous() if data.ndim else data.reshape(1)).view(bits).reshape(data.shape).numpy()
        return {"data": encoder.array(array, path), "dtype": _encode_dtype(data.dtype, encoder, path)}


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        raise EntryDamagedError("the entry holds a tensor on the meta device, which has no values")
    try:
        return tensor.to(device)
    # No such device here, no package for it, or a forked worker.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        if device not in _warned_devices:
            _warned_devices.add(device)
            warn_caller(f"cached tensors were on {device}, which is not available here: they stay on the CPU ({e})")
        return tensor


def _encode_meta(value: MetaTensor, encoder: Encoder, path: str) -> Json:
    if value.has_pending_operations:
        raise UnstorableError(f"{path or 'the item'} has pending lazy operations; apply them before it is cached")
    node = _encode_tensor(value.as_tensor(), encoder, path)
    node["meta"] = encoder.encode(value.meta, f"{path}.meta")
    node["applied_operations"] = encoder.encode(value.applied_operations, f"{path}.applied_operations")
    node["is_batch"] = bool(value.is_batch)
    if hasattr(value, "_spatial_ndim"):  # MONAI 1.6 and later
        node["spatial_ndim"] = int(value.spatial_ndim)
    return node


def _decode_meta(decode: Callable[[Json, Decoder], torch.Tensor], node: Json, decoder: Decoder) -> MetaTensor:
    # Not through the constructor, which adds an affine and a space where the original had none.
    tensor: MetaTensor = decode(node, decoder).as_subclass(MetaTensor)
    state: dict[str, Any] = tensor.__dict__
    state["_meta"] = decoder.decode(node["meta"])
    state["_applied_operations"] = decoder.decode(node["applied_operations"])
    state["_pending_operations"] = []
    state["_is_batch"] = bool(node["is_batch"])
    if "spatial_ndim" in node:
        state["_spatial_ndim"] = int(node["spatial_ndim"])
    return tensor


def _encode_size(value: torch.Size, _encoder: Encoder, _path: str) -> Json:
    return list(value)


def _decode_size(node: Json, _decoder: Decoder) -> torch.Size:
    return torch.Size(node)


def _encode_dtype(value: torch.dtype, _encoder: Encoder, _path: str) -> Json:
    return str(value).removeprefix("torch.")


def _decode_dtype(node: Json, _decoder: Decoder) -> torch.dtype:
    return _DTYPES[node]


def _encode_device(value: torch.device, _encoder: Encoder, _path: str) -> Json:
    return str(value)


def _decode_device(node: Json, _decoder: Decoder) -> torch.device:
    try:
        return torch.device(str(node))
    except RuntimeError as e:
        raise EntryDamagedError(f"the entry names an unknown device {node!r}") from e
