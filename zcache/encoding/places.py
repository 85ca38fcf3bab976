"""Where an item's arrays are, read from its payload tree without decoding it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding.payload import Json
from zcache.encoding.plain import BFLOAT16, MALFORMED, enum_value, plain_item, refuse
from zcache.encoding.storable import CORE_DTYPES
from zcache.errors import EntryDamagedError

__all__ = ["ARRAY_TAGS", "ArrayPlace", "array_places", "entries", "leaves"]

ARRAY_TAGS = ("$metatensor", "$tensor", "$ndarray")
"""What marks the arrays of an item."""

_NUMBERS = frozenset(np.dtype(text).name for text in CORE_DTYPES)
_MAPPINGS = ("$dict", "$ordereddict")
_SEQUENCES = ("$tuple", "$set", "$frozenset")


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


def array_places(tree: Json) -> list[ArrayPlace]:
    """Find the arrays of an item, those in the metadata of others apart.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.
    """
    try:
        return [_array_place(place, tag, body) for place, tag, body in leaves(tree, "") if tag in ARRAY_TAGS]
    except MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e


def leaves(node: Json, place: str) -> Iterator[tuple[str, str, Json]]:
    """Yield place, tag and body of every leaf; an empty tag for what is plain JSON."""
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from leaves(part, f"{place}[{i}]")
    elif not isinstance(node, dict):
        yield place or "item", "", node
    elif len(node) == 1 and next(iter(node)).startswith("$"):
        ((tag, body),) = node.items()
        if tag in _SEQUENCES:
            yield from leaves(body, place)
        elif tag in _MAPPINGS:
            for key, part in body:
                yield from leaves(part, _inside(place, _key_text(key)))
        else:
            yield place or "item", tag, body
    else:
        for key, part in node.items():
            yield from leaves(part, _inside(place, key))


def _inside(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _key_text(key: Json) -> str:
    return str(plain_item(key, refuse))


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


def entries(node: Json) -> dict[Any, Json]:
    """Return the undecoded values of a mapping by their decoded keys, as far as these are text."""
    if isinstance(node, dict) and len(node) == 1 and next(iter(node)) in _MAPPINGS:
        pairs = next(iter(node.values()))
        return {enum_value(k["$enum"]) if isinstance(k, dict) and "$enum" in k else str(k): v for k, v in pairs}
    return node if isinstance(node, dict) else {}
