"""Items as a tree of tagged JSON plus named arrays, and back with every type and bit intact.

An item is any nesting of containers and leaves. `encode_item` turns it into

* a **tree**: JSON that says, type for type, what the item is made of, and
* **leaves**: the large arrays, under names taken from their place in the item (``image``, ``label``,
  ``image.meta.mask``), which the store keeps as Zarr arrays.

Arrays of up to 4 KiB (affines, pixel sizes) stay in the tree, so that opening an entry is one small read.

What JSON says by itself stays plain JSON: ``None``, booleans, integers within ±2⁵³, finite floats, strings, lists
and dicts with string keys. Everything else is an object with one key that begins with ``$`` and names the type.
Nothing in a tree is executed, and no class is imported by a name that it holds: a tag is looked up in a table of
known tags, an enum among the modules that the process has already imported.

Types of torch and MONAI come as further `LeafCodec` objects, from the room that may import them.
"""

from __future__ import annotations

import base64
import binascii
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from zcache.encoding.enums import decode_enum, encode_enum
from zcache.encoding.leaves import BUILTIN_CODECS, Json, LeafCodec
from zcache.encoding.names import NameAllocator
from zcache.encoding.storable import from_storable, to_storable
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = [
    "INLINE_MAX_BYTES",
    "ArrayLeaf",
    "Decoder",
    "EncodedItem",
    "Encoder",
    "Json",
    "LeafCodec",
    "decode_item",
    "encode_item",
]

INLINE_MAX_BYTES = 4096
"""Arrays up to this many bytes stay in the JSON tree."""

_MAX_SAFE_INT = 2**53  # beyond it, JSON readers other than Python's round integers
_MAX_DEPTH = 200  # deeper than any item; keeps hostile trees from exhausting the stack


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLeaf:
    """One large array of an item.

    Attributes
    ----------
    name : str
        Name of the Zarr array, unique within the item.
    array : numpy.ndarray
        Values as they are stored: little-endian, bool, integer, float16/32/64 or complex64/128. Until
        `EncodedItem.snapshot` it may share memory with the item that it was taken from.
    """

    name: str
    array: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class EncodedItem:
    """An item taken apart: the JSON tree and the large arrays that it refers to by name."""

    tree: Json
    leaves: tuple[ArrayLeaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the large arrays."""
        return sum(leaf.array.nbytes for leaf in self.leaves)

    def disjoint(self) -> frozenset[str]:
        """Return the names of the arrays whose memory can be given away: writable, contiguous, nobody else's.

        Left out are views of other numpy arrays, buffers and memory maps, and arrays that overlap another one of the
        item: what is read back from an entry shares no memory either.
        """
        own = [leaf for leaf in self.leaves if _owns_memory(leaf.array)]
        spans = sorted((leaf.array.__array_interface__["data"][0], leaf.array.nbytes, leaf.name) for leaf in own)
        alone = []
        reached = 0
        for i, (start, nbytes, name) in enumerate(spans):
            if start >= reached and (i + 1 == len(spans) or start + nbytes <= spans[i + 1][0]):
                alone.append(name)
            reached = max(reached, start + nbytes)
        return frozenset(alone)

    def snapshot(self) -> EncodedItem:
        """Return the same item with C-contiguous private copies of its arrays."""
        copies = (ArrayLeaf(leaf.name, np.array(leaf.array, order="C", copy=True)) for leaf in self.leaves)
        return EncodedItem(self.tree, tuple(copies))


class Encoder:
    """Walks one item. Leaf codecs use `encode` for nested values and `array` for the bits of an array."""

    def __init__(self, codecs: Iterable[LeafCodec] = (), inline_max_bytes: int = INLINE_MAX_BYTES) -> None:
        self._by_type = {t: c for c in (*BUILTIN_CODECS, *codecs) for t in c.types}
        self._inline_max_bytes = inline_max_bytes
        self._names = NameAllocator()
        self._open: set[int] = set()
        self.leaves: list[ArrayLeaf] = []

    def encode(self, value: Any, path: str) -> Json:
        """Encode a nested value; `path` says where it is, for names and for errors."""
        kind = type(value)
        if _is_plain_json(value, kind):
            return value
        if kind is list:
            return self._nested(value, path, self.sequence)
        if kind is dict:
            return self._nested(value, path, self._dict)
        codec = self._by_type.get(kind)
        if codec is not None:
            return {codec.tag: self._nested(value, path, lambda v, p: codec.encode(v, self, p))}
        if isinstance(value, Enum):
            return {"$enum": encode_enum(value, path)}
        raise UnstorableError(
            f"{path or 'the item'} is a {kind.__module__}.{kind.__qualname__}, which a cache entry cannot hold: "
            "store an array, a tensor, numbers, strings or containers of these instead"
        )

    def sequence(self, values: Iterable[Any], path: str) -> list[Json]:
        """Encode the members of a list, tuple or set in order."""
        return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, Any], path: str) -> list[Json]:
        """Encode a mapping as a list of ``[key, value]``, for keys of any type."""
        return [[self.encode(k, f"{path}.keys()"), self.encode(v, f"{path}[{k!r}]")] for k, v in mapping.items()]

    def array(self, array: np.ndarray, path: str) -> Json:
        """Take in an array; return the JSON that `Decoder.array` restores it from, bit for bit.

        Raises
        ------
        UnstorableError
            The dtype has no fixed bits of its own (objects) or has fields (structured).
        """
        stored = to_storable(array, path)
        if stored.nbytes <= self._inline_max_bytes:
            data = base64.b64encode(stored.tobytes()).decode("ascii")
            return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": data}
        name = self._names.allocate(path)
        self.leaves.append(ArrayLeaf(name, stored))
        return {"dtype": array.dtype.str, "shape": list(array.shape), "array": name}

    def _dict(self, value: dict[Any, Any], path: str) -> Json:
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, f"{path}[{k!r}]") for k, v in value.items()}
        return {"$dict": self.pairs(value, path)}

    def _nested(self, value: Any, path: str, encode: Callable[[Any, str], Json]) -> Json:
        if id(value) in self._open:
            raise UnstorableError(f"{path or 'the item'} contains itself, which a cache entry cannot express")
        if len(self._open) >= _MAX_DEPTH:
            raise UnstorableError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
        self._open.add(id(value))
        try:
            return encode(value, path)
        finally:
            self._open.remove(id(value))


class Decoder:
    """Rebuilds one item. Leaf codecs use `decode` for nested nodes and `array` for the bits of an array."""

    def __init__(self, load: Callable[[str], np.ndarray], codecs: Iterable[LeafCodec] = ()) -> None:
        self._by_tag = {c.tag: c for c in (*BUILTIN_CODECS, *codecs)}
        self._load = load
        self._claimed: set[str] = set()

    def decode(self, node: Json) -> Any:
        """Decode a nested node."""
        if isinstance(node, list):
            return [self.decode(n) for n in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((tag, body),) = node.items()
            if tag.startswith("$"):
                if tag == "$enum":
                    return decode_enum(body)
                codec = self._by_tag.get(tag)
                if codec is None:
                    raise EntryDamagedError(f"the entry holds a value of the unknown type {tag!r:.100}")
                return codec.decode(body, self)
        return {k: self.decode(v) for k, v in node.items()}

    def array(self, ref: Json) -> np.ndarray:
        """Return the array of a reference made by `Encoder.array`, writable and private to the caller."""
        shape = tuple(int(n) for n in ref["shape"])
        if "base64" in ref:
            raw = np.frombuffer(bytearray(binascii.a2b_base64(ref["base64"], strict_mode=True)), np.uint8)
            return from_storable(raw, str(ref["dtype"]), shape)
        return from_storable(self._load(self.claim(ref)), str(ref["dtype"]), shape)

    def claim(self, ref: Json) -> str:
        """Return the name of the large array of a reference, the first to it; for codecs that load it by themselves.

        Raises
        ------
        EntryDamagedError
            It is in another place of the item already: a small tree could ask for a large array any number of times.
        """
        name = str(ref["array"])
        if name in self._claimed:
            raise EntryDamagedError(f"the entry holds its array {name!r:.100} in more than one place")
        self._claimed.add(name)
        return name


def encode_item(
    item: Any, codecs: Iterable[LeafCodec] = (), *, inline_max_bytes: int = INLINE_MAX_BYTES
) -> EncodedItem:
    """Take an item apart.

    Parameters
    ----------
    item : object
        Any nesting of dict, list, tuple, set and leaves. Not changed; the leaves' arrays may share its memory.
    codecs : iterable of LeafCodec
        Further types, such as tensors.
    inline_max_bytes : int
        Arrays of at most this many bytes stay in the tree.

    Raises
    ------
    UnstorableError
        A leaf has a type that the format cannot express; the message names its path and type.

    Examples
    --------
    >>> import numpy as np
    >>> encoded = encode_item({"image": np.zeros((1, 64, 64), "f4"), "id": (7, "a")})
    >>> [leaf.name for leaf in encoded.leaves]
    ['image']
    >>> encoded.tree["id"]
    {'$tuple': [7, 'a']}
    """
    encoder = Encoder(codecs, inline_max_bytes)
    tree = encoder.encode(item, "")
    return EncodedItem(tree, tuple(encoder.leaves))


def decode_item(tree: Json, load: Callable[[str], np.ndarray], codecs: Iterable[LeafCodec] = ()) -> Any:
    """Rebuild an item from its tree.

    Parameters
    ----------
    tree : Json
        As made by `encode_item`, possibly by somebody else: it is checked, never trusted.
    load : callable
        ``load(name)`` returns the large array of that name: writable, C-contiguous, not shared.
    codecs : iterable of LeafCodec
        The same further types as when encoding.

    Raises
    ------
    EntryDamagedError
        The tree is malformed or names a type that is not known here.
    """
    try:
        return Decoder(load, codecs).decode(tree)
    except EntryDamagedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError) as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e


def _owns_memory(array: np.ndarray) -> bool:
    # A base that is none of numpy's is the tensor that the array was taken from.
    base = array.base
    own = base is None or not isinstance(base, np.ndarray | np.generic | bytes | bytearray | memoryview | mmap.mmap)
    return own and array.flags.c_contiguous and array.flags.writeable


def _is_plain_json(value: Any, kind: type) -> bool:
    if kind is int:
        return bool(-_MAX_SAFE_INT <= value <= _MAX_SAFE_INT)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool or kind is str
