"""How values of Python's and numpy's own types are written into a payload tree, and read back.

A table of tags, each with the exact types that it stands for; what is in no table cannot be stored. The tree itself is
walked by `zcache.encoding.payload`.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from zcache.encoding.storable import parse_dtype
from zcache.errors import EntryDamagedError, UnstorableError

if TYPE_CHECKING:
    from zcache.encoding.payload import Decoder, Encoder

__all__ = ["BUILTIN_CODECS", "Json", "LeafCodec"]

Json: TypeAlias = Any
"""What :mod:`json` reads and writes: None, bool, int, float, str, list, dict."""

_FLOAT = struct.Struct(">d")
_MAX_EQUAL_HASHES = 64


@dataclass(frozen=True, slots=True)
class LeafCodec:
    """How one type is written into a tree and read back.

    Attributes
    ----------
    tag : str
        Key of the JSON object, beginning with ``$``.
    types : tuple of type
        The exact types that it encodes (subclasses are other types).
    encode : callable
        ``encode(value, encoder, path) -> Json``, the value under the tag.
    decode : callable
        ``decode(node, decoder) -> value``. May raise ValueError, TypeError, KeyError, IndexError or OverflowError
        for a malformed node; `decode_item` turns these into `EntryDamagedError`.
    """

    tag: str
    types: tuple[type, ...]
    encode: Callable[[Any, Encoder, str], Json]
    decode: Callable[[Json, Decoder], Any]


def _encode_bytes(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode_bytes(node: Json) -> bytes:
    try:
        return base64.b64decode(node, validate=True)
    except binascii.Error as e:
        raise EntryDamagedError("the entry holds malformed base64") from e


def _encode_float(value: float) -> str:
    return _FLOAT.pack(value).hex()  # the bits: a NaN has a payload


def _decode_float(node: Json) -> float:
    bits = bytes.fromhex(node)
    if len(bits) != _FLOAT.size:
        raise ValueError(f"{len(bits)} bytes instead of a float")
    return float(_FLOAT.unpack(bits)[0])


def _encode_numpy_scalar(value: np.generic, encoder: Encoder, path: str) -> Json:
    return encoder.array(np.asarray(value), path)


def _encode_dtype(value: np.dtype[Any], _encoder: Encoder, path: str) -> str:
    if value.kind in "OV":
        raise UnstorableError(f"{path} is the dtype {value}: structured and object dtypes cannot be stored")
    return value.str


def _decode_pairs(node: Json, decoder: Decoder) -> Iterable[tuple[Any, Any]]:
    pairs = [(decoder.decode(k), decoder.decode(v)) for k, v in node]
    _hashed([k for k, _ in pairs])
    return pairs


def _hashed(members: list[Any]) -> list[Any]:
    """Return the members of a set, or the keys of a mapping, unless they were chosen to make it slow.

    Numbers hash to themselves modulo 2⁶¹ − 1, so anybody can make up any number of them that share one hash; a set of
    a million such takes hours.
    """
    if len(members) > _MAX_EQUAL_HASHES:
        hashes = np.sort(np.fromiter(map(hash, members), np.int64, len(members)))
        if (hashes[_MAX_EQUAL_HASHES:] == hashes[:-_MAX_EQUAL_HASHES]).any():
            raise EntryDamagedError("the entry holds a set or mapping of members that share one hash")
    return members


_PATHS: dict[str, type[PurePath]] = {
    "path": type(Path()),
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}
_PATH_KINDS = {kind: tag for tag, kind in _PATHS.items()}
_SCALARS = tuple(t for t in set(np.sctypeDict.values()) if not issubclass(t, np.void | np.object_))
_NUMPY_DTYPES = tuple({type(np.dtype(t)) for t in np.sctypeDict.values()})

BUILTIN_CODECS: tuple[LeafCodec, ...] = (
    LeafCodec(
        "$tuple",
        (tuple,),
        lambda v, e, p: e.sequence(v, p),
        lambda n, d: tuple(d.decode(x) for x in n),
    ),
    LeafCodec("$set", (set,), lambda v, e, p: e.sequence(v, p), lambda n, d: set(_hashed([d.decode(x) for x in n]))),
    LeafCodec(
        "$frozenset",
        (frozenset,),
        lambda v, e, p: e.sequence(v, p),
        lambda n, d: frozenset(_hashed([d.decode(x) for x in n])),
    ),
    LeafCodec("$dict", (), lambda v, e, p: e.pairs(v, p), lambda n, d: dict(_decode_pairs(n, d))),
    LeafCodec(
        "$ordereddict",
        (OrderedDict,),
        lambda v, e, p: e.pairs(v, p),
        lambda n, d: OrderedDict(_decode_pairs(n, d)),
    ),
    LeafCodec("$int", (int,), lambda v, _e, _p: hex(v), lambda n, _d: int(n, 16)),
    LeafCodec("$float", (float,), lambda v, _e, _p: _encode_float(v), lambda n, _d: _decode_float(n)),
    LeafCodec(
        "$complex",
        (complex,),
        lambda v, _e, _p: [_encode_float(v.real), _encode_float(v.imag)],
        lambda n, _d: complex(_decode_float(n[0]), _decode_float(n[1])),
    ),
    LeafCodec("$bytes", (bytes,), lambda v, _e, _p: _encode_bytes(v), lambda n, _d: _decode_bytes(n)),
    LeafCodec(
        "$bytearray", (bytearray,), lambda v, _e, _p: _encode_bytes(v), lambda n, _d: bytearray(_decode_bytes(n))
    ),
    LeafCodec("$range", (range,), lambda v, _e, _p: [v.start, v.stop, v.step], lambda n, _d: range(*n)),
    LeafCodec(
        "$slice",
        (slice,),
        lambda v, e, p: e.sequence((v.start, v.stop, v.step), p),
        lambda n, d: slice(*(d.decode(x) for x in n)),
    ),
    LeafCodec(
        "$path",
        tuple(_PATH_KINDS),
        lambda v, _e, _p: [_PATH_KINDS[type(v)], str(v)],
        lambda n, _d: _PATHS[n[0]](n[1]),
    ),
    LeafCodec("$ellipsis", (type(...),), lambda _v, _e, _p: True, lambda _n, _d: ...),
    LeafCodec(
        "$ndarray",
        (np.ndarray, np.memmap),
        lambda v, e, p: e.array(np.asarray(v), p),
        lambda n, d: d.array(n),
    ),
    LeafCodec("$npscalar", _SCALARS, _encode_numpy_scalar, lambda n, d: d.array(n)[()]),
    LeafCodec("$dtype", _NUMPY_DTYPES, _encode_dtype, lambda n, _d: parse_dtype(str(n))),
)
