"""Items without torch and MONAI: tensors as numpy arrays, enums by their values, and where an item's arrays are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding.payload import Decoder, Json, LeafCodec
from zcache.encoding.storable import CORE_DTYPES
from zcache.errors import EntryDamagedError

__all__ = ["BFLOAT16", "ArrayPlace", "UnknownValue", "array_places", "plain_item", "scalars", "widened"]

BFLOAT16 = "bfloat16"
"""The one common type that numpy lacks."""

_NUMBERS = frozenset(np.dtype(text).name for text in CORE_DTYPES)
_ARRAY_TAGS = ("$metatensor", "$tensor", "$ndarray")
_MAPPINGS = ("$dict", "$ordereddict")
_SEQUENCES = ("$tuple", "$set", "$frozenset")
_MONAI_ENUMS = "monai.utils.enums"
# Members whose value is not their name in lower case.
_MONAI_VALUES = {
    ("TraceKeys", "CLASS_NAME"): "class",
    ("TraceKeys", "DO_TRANSFORM"): "do_transforms",
    ("TraceKeys", "KEY_SUFFIX"): "_transforms",
    ("SpaceKeys", "RAS"): "RAS",
    ("SpaceKeys", "LPS"): "LPS",
}
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """Stands for a value of a type that only the program which wrote it can restore.

    Attributes
    ----------
    tag : str
        What the entry calls the type.
    """

    tag: str


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPlace:
    """An array in an item.

    Attributes
    ----------
    place : str
        Where it is: ``image``, ``scans[0]``.
    kind : str
        ``"metatensor"``, ``"tensor"`` or ``"ndarray"``.
    shape : tuple of int
        As in the item.
    dtype : str
        As the item has it, such as ``float32`` or ``bfloat16``.
    name : str
        Of the stored array; empty if the array is small and part of the document.
    node : Json
        What the payload says of it.
    """

    place: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    name: str
    node: Json

    @property
    def is_plain(self) -> bool:
        """Whether what is stored are the numbers themselves."""
        return self.dtype in _NUMBERS

    @property
    def is_numeric(self) -> bool:
        """Whether it holds numbers, in whatever byte order."""
        return self.is_plain or self.dtype == BFLOAT16 or self.dtype[1:2] in ("b", "i", "u", "f", "c")


class _PlainDecoder(Decoder):
    """Restores items as Python and numpy have them. Nothing need be imported, so an enum gives its value's name."""

    def decode(self, node: Json) -> Any:
        if isinstance(node, dict) and len(node) == 1:
            ((tag, body),) = node.items()
            if tag == "$enum":
                return _enum_value(body)
            if tag.startswith("$") and tag not in self._by_tag:
                return UnknownValue(tag)
        return super().decode(node)


def plain_item(tree: Json, load: Callable[[str], np.ndarray]) -> Any:
    """Rebuild an item, or a part of one, with numpy arrays in place of tensors.

    Tensors of bfloat16 become float32, which holds the same values. Other types that numpy lacks stay as integers of
    the same bits. Members of enums become their values as text.

    Parameters
    ----------
    tree : Json
        A payload tree.
    load : callable
        ``load(name)`` returns a large array.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.

    Examples
    --------
    >>> tree = {"key": {"$enum": ["monai.utils.enums", "MetaKeys", "AFFINE"]}, "size": {"$torch.size": [1, 2]}}
    >>> plain_item(tree, lambda name: np.zeros(0))
    {'key': 'affine', 'size': (1, 2)}
    """
    try:
        return _PlainDecoder(load, _PLAIN_CODECS).decode(tree)
    except EntryDamagedError:
        raise
    except _MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e


def array_places(tree: Json) -> list[ArrayPlace]:
    """Find the arrays of an item, those in the metadata of others apart.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.
    """
    try:
        return [_array_place(place, tag, body) for place, tag, body in _leaves(tree, "") if tag in _ARRAY_TAGS]
    except _MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e


def scalars(tree: Json) -> dict[str, str]:
    """Return the values of an item that are no arrays, as text, by their places.

    Names of the files that tensors were loaded from count too.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.

    Examples
    --------
    >>> scalars({"patient": "P001", "age": 63, "parts": {"$tuple": ["left", None]}})
    {'patient': 'P001', 'age': '63', 'parts[0]': 'left', 'parts[1]': 'None'}
    """
    found = {}
    try:
        for place, tag, body in _leaves(tree, ""):
            if tag == "$metatensor":
                name = _entries(body["meta"]).get("filename_or_obj")
                if isinstance(name, str):
                    found[f"{place}.meta.filename_or_obj"] = name
            elif tag not in _ARRAY_TAGS:
                found[place] = str(plain_item({tag: body} if tag else body, _refuse))
    except _MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e
    return found


def _refuse(name: str) -> np.ndarray:
    raise EntryDamagedError(f"the entry holds its array {name!r:.100} where no array belongs")


def _leaves(node: Json, place: str) -> Iterator[tuple[str, str, Json]]:
    """Yield place, tag and body of every leaf; an empty tag for what is plain JSON."""
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from _leaves(part, f"{place}[{i}]")
    elif not isinstance(node, dict):
        yield place or "item", "", node
    elif len(node) == 1 and next(iter(node)).startswith("$"):
        ((tag, body),) = node.items()
        if tag in _SEQUENCES:
            yield from _leaves(body, place)
        elif tag in _MAPPINGS:
            for key, part in body:
                yield from _leaves(part, _inside(place, _key_text(key)))
        else:
            yield place or "item", tag, body
    else:
        for key, part in node.items():
            yield from _leaves(part, _inside(place, key))


def _inside(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _key_text(key: Json) -> str:
    return str(plain_item(key, _refuse))


def _array_place(place: str, tag: str, body: Json) -> ArrayPlace:
    ref = body if tag == "$ndarray" else body["data"]
    dtype = np.dtype(str(ref["dtype"]))
    native = dtype.kind in "biufc" and dtype.isnative
    named = str(body["dtype"]) if tag != "$ndarray" and "dtype" in body else ""
    return ArrayPlace(
        place,
        tag[1:],
        tuple(int(n) for n in ref["shape"]),
        named or (dtype.name if native else dtype.str),
        str(ref.get("array", "")),
        body,
    )


def _entries(node: Json) -> dict[Any, Json]:
    """Return the undecoded values of a mapping by their decoded keys, as far as these are text."""
    if isinstance(node, dict) and len(node) == 1 and next(iter(node)) in _MAPPINGS:
        pairs = next(iter(node.values()))
        return {_enum_value(k["$enum"]) if isinstance(k, dict) and "$enum" in k else str(k): v for k, v in pairs}
    return node if isinstance(node, dict) else {}


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 from their bits, as float32.

    Examples
    --------
    >>> widened(np.array([0x3FC0], np.int16))
    array([1.5], dtype=float32)
    """
    wide: np.ndarray = np.atleast_1d(bits).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(bits.shape)


def _enum_value(body: Json) -> str:
    module, kind, member = (str(part) for part in body)
    if module != _MONAI_ENUMS:
        return f"{kind}.{member}"
    return _MONAI_VALUES.get((kind, member), member.lower())


def _tensor(node: Json, decoder: Decoder) -> np.ndarray:
    array = decoder.array(node["data"])
    return widened(array) if node.get("dtype") == BFLOAT16 else array


def _no_encode(_value: Any, _encoder: Any, path: str) -> Json:
    raise NotImplementedError(path)  # pragma: no cover - nothing is written here


_PLAIN_CODECS = (
    LeafCodec("$tensor", (), _no_encode, _tensor),
    LeafCodec("$metatensor", (), _no_encode, _tensor),
    LeafCodec("$torch.size", (), _no_encode, lambda n, _d: tuple(int(k) for k in n)),
    LeafCodec("$torch.dtype", (), _no_encode, lambda n, _d: f"torch.{n}"),
    LeafCodec("$torch.device", (), _no_encode, lambda n, _d: str(n)),
)
