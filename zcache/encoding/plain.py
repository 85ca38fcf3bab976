"""Items without torch and MONAI: tensors as numpy arrays, enums by their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding.payload import Decoder, Json, LeafCodec
from zcache.errors import EntryDamagedError

__all__ = ["BFLOAT16", "MALFORMED", "UnknownValue", "enum_value", "plain_item", "refuse", "widened"]

BFLOAT16 = "bfloat16"
"""The one common type that numpy lacks."""

MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError)
"""What walking through a tree that somebody made up may raise."""

_MONAI_ENUMS = "monai.utils.enums"
# Members whose value is not their name in lower case.
_MONAI_VALUES = {
    ("TraceKeys", "CLASS_NAME"): "class",
    ("TraceKeys", "DO_TRANSFORM"): "do_transforms",
    ("TraceKeys", "KEY_SUFFIX"): "_transforms",
    ("SpaceKeys", "RAS"): "RAS",
    ("SpaceKeys", "LPS"): "LPS",
}


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """Stands for a value of a type that only the program which wrote it can restore.

    Attributes
    ----------
    tag : str
        What the entry calls the type.
    """

    tag: str


class _PlainDecoder(Decoder):
    """Restores items as Python and numpy have them. Nothing need be imported, so an enum gives its value's name."""

    def decode(self, node: Json) -> Any:
        if isinstance(node, dict) and len(node) == 1:
            ((tag, body),) = node.items()
            if tag == "$enum":
                return enum_value(body)
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
    except MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e


def refuse(name: str) -> np.ndarray:
    """Load no array: for parts of an item in which none belongs."""
    raise EntryDamagedError(f"the entry holds its array {name!r:.100} where no array belongs")


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 from their bits, as float32.

    Examples
    --------
    >>> widened(np.array([0x3FC0], np.int16))
    array([1.5], dtype=float32)
    """
    wide: np.ndarray = np.atleast_1d(bits).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(bits.shape)


def enum_value(body: Json) -> str:
    """Return the value of a member of one of MONAI's enums; of others, the name of the member."""
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
