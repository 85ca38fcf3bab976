"""Pictures in a terminal: two pixels in each letter, the upper half block in two colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from zcache.inspection.palette import blended, codes, overlay
from zcache.inspection.planes import Plane
from zcache.inspection.subjects import picked, picked_label, read_planes
from zcache.inspection.thumbnails import grey
from zcache.inspection.windows import Window, limits

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["drawn"]

_GAP = 2


def drawn(entry: EntryView, columns: int, window: Window = None) -> Text:
    """Return the middle slices of an entry, with the label over them, side by side in so many columns.

    Raises
    ------
    ZCacheError, OSError
        The entry cannot be read, or has no image.
    """
    image = picked(entry, None)
    slices = read_planes(entry, *image)
    label = picked_label(entry, image, None)
    over: list[Plane | None] = [*read_planes(entry, *label)] if label else [None] * len(slices)
    shown = limits(window, [plane.image for plane in slices])
    wide = sum(plane.extent[1] for plane in slices)
    scale = (columns - _GAP * len(slices)) / wide
    parts = [_pixels(plane, cover, shown, scale) for plane, cover in zip(slices, over, strict=True)]
    height = max(len(part) for part in parts)
    height += height % 2
    canvas = [np.pad(part, ((0, height - len(part)), (0, _GAP), (0, 0))) for part in parts]
    return _text(np.concatenate(canvas, axis=1))


def _pixels(plane: Plane, over: Plane | None, shown: tuple[float, float], scale: float) -> np.ndarray:
    """Return a slice as colours, one pixel for each column."""
    height, width = (max(1, round(n * scale)) for n in plane.extent)
    nearest = np.ix_(*(np.arange(n) * size // n for n, size in zip((height, width), plane.image.shape, strict=False)))
    pixels = grey(plane.image[nearest], shown)
    if over is None:
        return np.repeat(pixels[..., None], 3, axis=-1)
    return blended(pixels, overlay(codes(over.image[nearest])))


def _text(pixels: np.ndarray) -> Text:
    text = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for a, b in zip(upper, lower, strict=True):
            text.append("▀", f"rgb({a[0]},{a[1]},{a[2]}) on rgb({b[0]},{b[1]},{b[2]})")
        text.append("\n")
    return text
