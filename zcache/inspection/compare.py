"""What tells two entries apart: their sources, their pipelines, their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zcache.encoding.payload import Json
from zcache.inspection.display import shape_text
from zcache.inspection.pipelines import Pipeline, difference

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["Comparison", "compare", "compare_arrays"]

_WORDS = (1, 2, 4, 8)  # bytes of an element that are compared as one number


@dataclass(frozen=True, slots=True)
class Comparison:
    """What tells two entries apart; empty tuples where they are the same.

    Attributes
    ----------
    source, pipeline, values, arrays : tuple of str
        A line for each difference.
    """

    source: tuple[str, ...]
    pipeline: tuple[str, ...]
    values: tuple[str, ...]
    arrays: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the items are the same, wherever they come from."""
        return not (self.values or self.arrays)

    def to_json(self) -> Json:
        """Return it as JSON."""
        return {"same": self.same, **{name: list(getattr(self, name)) for name in self.__slots__}}


def compare(a: EntryView, b: EntryView) -> Comparison:
    """Compare two entries, all arrays bit by bit.

    Raises
    ------
    ZCacheError, OSError
        One of them cannot be read.
    """
    old, new = a.info.source, b.info.source
    source = [f"− {name}" for name in old if name not in new] + [f"+ {name}" for name in new if name not in old]
    pipelines = a.info.pipeline or Pipeline(()), b.info.pipeline or Pipeline(())
    return Comparison(
        tuple(source),
        () if pipelines[0] is pipelines[1] else tuple(difference(*pipelines)),
        tuple(_differences(a.scalars, b.scalars)),
        tuple(_array_differences(a, b)),
    )


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*a, *b]):
        if name not in b:
            lines.append(f"− {name} = {a[name]}")
        elif name not in a:
            lines.append(f"+ {name} = {b[name]}")
        elif a[name] != b[name]:
            lines.append(f"~ {name}: {a[name]} → {b[name]}")
    return lines


def _array_differences(a: EntryView, b: EntryView) -> list[str]:
    old, new = ({place.place: place for place in entry.places} for entry in (a, b))
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            lines.append(f"− {name} {shape_text(old[name].shape)} {old[name].dtype}")
        elif name not in old:
            lines.append(f"+ {name} {shape_text(new[name].shape)} {new[name].dtype}")
        elif (was := (old[name].kind, old[name].shape, old[name].dtype)) != (
            now := (new[name].kind, new[name].shape, new[name].dtype)
        ):
            texts = [f"{kind} {shape_text(shape)} {dtype}" for kind, shape, dtype in (was, now)]
            lines.append(f"~ {name}: {' → '.join(texts)}")
        elif what := compare_arrays(a.read(name), b.read(name)):
            lines.append(f"~ {name}: {what}")
    before, after = a.meta, b.meta
    lines += [
        f"~ {name}.affine: another one"
        for name in before
        if name in after and not _same_affine(before[name].get("affine"), after[name].get("affine"))
    ]
    return lines


def compare_arrays(a: np.ndarray, b: np.ndarray) -> str:
    """Say how two arrays of one shape and dtype differ; an empty string if not a bit.

    Examples
    --------
    >>> compare_arrays(np.array([0.0, 1.0]), np.array([0.0, 1.5]))
    '1 of 2 values differ, by 0.5 at most'
    >>> compare_arrays(np.array([0.0]), np.array([-0.0]))
    '1 of 1 values differ, in bits only'
    """
    flat = [np.ascontiguousarray(array).reshape(-1) for array in (a, b)]
    bits: list[np.ndarray]
    if a.itemsize in _WORDS:
        bits = [array.view(f"u{a.itemsize}") for array in flat]
        differs = bits[0] != bits[1]
    else:
        bits = [array.view(np.uint8).reshape(array.size, -1) for array in flat]
        differs = (bits[0] != bits[1]).any(axis=1)
    n = int(differs.sum())
    if not n:
        return ""
    what = f"{n:,} of {a.size:,} values differ"
    if a.dtype.kind not in "biufc":
        return what
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        steps = np.abs(flat[0][differs].astype(wide) - flat[1][differs].astype(wide))
    largest = float(np.nan_to_num(steps, nan=0.0).max())
    return f"{what}, by {largest:.3g} at most" if largest else f"{what}, in bits only"


def _same_affine(a: object, b: object) -> bool:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return (a is None) == (b is None)
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=True))
