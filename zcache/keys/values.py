"""Values without parts: their descriptions, and the hash of a description."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

__all__ = ["PLAIN", "UNDERLYING", "Json", "array_content", "canonical_json", "digest", "dtype_form", "tensor_content"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_SHORT = 64  # bytes that are shown as they are
_DOUBLE = 8  # bytes of a float without padding; long doubles have some, of undefined content


def canonical_json(value: Json) -> str:
    r"""Write a description as the one JSON text that it has: sorted keys, no spaces, ASCII.

    Parameters
    ----------
    value : Json
        A description.

    Returns
    -------
    str
        Its JSON text.

    Raises
    ------
    ValueError
        If it holds a NaN or an infinity, which JSON has no text for.

    Examples
    --------
    >>> canonical_json({"b": [1, None], "a": "é"})
    '{"a":"\\u00e9","b":[1,null]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Json) -> str:
    """Hash a description.

    Parameters
    ----------
    value : Json
        A description.

    Returns
    -------
    str
        32 hexadecimal digits: 128-bit BLAKE2b of the canonical JSON.

    Examples
    --------
    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    return _hash(canonical_json(value).encode("ascii"))


def dtype_form(dtype: Any) -> Json:
    """Describe a NumPy dtype.

    Parameters
    ----------
    dtype : np.dtype
        Any dtype.

    Returns
    -------
    Json
        Its description.

    Examples
    --------
    >>> dtype_form(np.dtype("<i2"))
    ['dtype', '<i2', 'int16']
    """
    if dtype.subdtype is not None:
        return ["dtype", dtype_form(dtype.subdtype[0]), list(dtype.subdtype[1])]
    if dtype.names is not None:
        return ["dtype", [[name, dtype_form(dtype.fields[name][0]), dtype.fields[name][1]] for name in dtype.names]]
    return ["dtype", dtype.str, dtype.name]  # the name tells extension types such as bfloat16, "<V2", apart


def array_content(data: np.ndarray[Any, Any]) -> Json:
    """Hash the content of an array that is neither structured nor of objects.

    Parameters
    ----------
    data : np.ndarray
        An array of any strides and byte order.

    Returns
    -------
    Json
        The hash of its bytes in C order; for long doubles, whose bytes have padding, the numbers.

    Examples
    --------
    >>> array_content(np.eye(2)) == array_content(np.asfortranarray(np.eye(2)))
    True
    """
    if data.dtype.kind in "fc" and data.dtype.itemsize > _DOUBLE * (1 + (data.dtype.kind == "c")):
        return [repr(number) for number in data.ravel().tolist()]
    return _hash(np.ascontiguousarray(data).reshape(-1).view(np.uint8) if data.nbytes else b"")


def tensor_content(torch: Any, tensor: Any) -> Json:
    """Hash the content of a torch tensor.

    Parameters
    ----------
    torch : module
        PyTorch, which the caller has found loaded.
    tensor : torch.Tensor
        A tensor that has content: not on the meta device, not nested, not quantised.

    Returns
    -------
    Json
        The hash of its bytes in C order.

    Examples
    --------
    >>> import torch
    >>> tensor_content(torch, torch.ones(2, 3).T) == tensor_content(torch, torch.ones(3, 2))
    True
    """
    plain = tensor.detach()
    dense = plain.as_subclass(torch.Tensor) if plain.layout == torch.strided else plain.to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _hash(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _hash(data: Any) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _bytes(value: bytes | bytearray) -> list[Json]:
    return [len(value), value.hex() if len(value) <= _SHORT else _hash(value)]


PLAIN: dict[type, Callable[[Any], Json]] = {
    type(None): lambda _: None,
    str: lambda value: value,
    bool: lambda value: ["bool", value],
    int: lambda value: ["int", value if abs(value) < 1 << 63 else hex(value)],
    float: lambda value: ["float", value.hex()],
    complex: lambda value: ["complex", value.real.hex(), value.imag.hex()],
    bytes: lambda value: ["bytes", *_bytes(value)],
    bytearray: lambda value: ["bytearray", *_bytes(value)],
    type(...): lambda _: ["Ellipsis"],
    type(NotImplemented): lambda _: ["NotImplemented"],
}
# The value of an instance of a subclass, whatever that subclass overrides.
UNDERLYING: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    bytes: bytes.__bytes__,
    bytearray: bytes,
}
