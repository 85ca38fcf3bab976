"""Figures of volumes: slices with a label over them, what is black and white, what colours mean. Needs matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from zcache.encoding.geometry import Geometry
from zcache.encoding.places import ArrayPlace
from zcache.errors import CacheConfigError
from zcache.inspection import display
from zcache.inspection.classes import LabelClass, label_classes
from zcache.inspection.panels import Sheet, number_text
from zcache.inspection.planes import VIEWS, Plane, ReadRegion
from zcache.inspection.slices import middle, mosaic_view, n_slices, plane_at, spread
from zcache.inspection.subjects import picked, picked_label
from zcache.inspection.windows import Window, limits, parse_window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zcache.inspection.entry import EntryView

__all__ = ["Layout", "draw"]

Layout: TypeAlias = Literal["planes", "mosaic"]

_LONGEST = 3.6  # inches of the longest side of a slice
_WIDEST, _HIGHEST = 10.6, 7.0  # inches of a mosaic
_TILES = 24
_MARGIN, _GAP, _SEAM = 0.2, 0.2, 0.04
_HEAD, _TITLE, _FOOT = 0.55, 0.25, 1.15
_TICKS = 0.1
_ROOM = 0.22  # inches of a line above a panel
_LEAST = 6.4  # inches that the lines of text need
_HISTOGRAM = 4.6
_RGB = 3
_GOOD = 1.5  # width of a mosaic divided by its height


@dataclass(frozen=True, slots=True)
class _Subject:
    """An array that is drawn."""

    place: ArrayPlace
    space: Geometry
    read: ReadRegion
    channel: int = 0

    def plane(self, view: str, index: int) -> Plane:
        return plane_at(self.read, self.space, view, index, self.channel)

    @property
    def is_flat(self) -> bool:
        return len(self.space.spatial) < len(VIEWS)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A slice, where it is among its like, and what lies over it."""

    plane: Plane
    over: Plane | None
    index: int
    count: int


def draw(
    entry: EntryView,
    image: str | None = None,
    label: str | bool | None = None,
    channel: int = 0,
    window: Window = None,
    layout: Layout = "planes",
) -> Figure:
    """Draw slices of an entry; see `EntryView.plot`."""
    if layout not in ("planes", "mosaic"):
        raise CacheConfigError(f"layout={layout!r} is neither 'planes' nor 'mosaic'")
    subject = _subject(entry, *picked(entry, image), channel)
    over = picked_label(entry, (subject.place, subject.space), label)
    cover = None if over is None else _subject(entry, *over, 0)
    flat = layout == "planes" or subject.is_flat
    tiles = _planes(subject, cover) if flat else _mosaic(subject, cover)
    images = [tile.plane.image for tile in tiles if tile.plane.image.ndim < _RGB]
    black, white = limits(window, images) if images else (0.0, 255.0)
    classes = [] if cover is None else label_classes(cover.read, cover.space)
    boxes, width, height = _row(tiles) if flat else _grid(tiles)
    foot = _FOOT + _TICKS if images or classes else 0.0
    sheet = Sheet(max(width, _LEAST) + 2 * _MARGIN, _HEAD + height + foot + _MARGIN)
    indent = (sheet.width - width) / 2
    known = subject.space.affine is not None
    barred = max(range(len(tiles)), key=lambda i: boxes[i][3]) if flat else 0
    for i, (tile, (x, y, w, h)) in enumerate(zip(tiles, boxes, strict=True)):
        at = indent + x, _HEAD + y, w, h
        title = f"{tile.plane.view}  {tile.index} of {tile.count}" if flat and not subject.is_flat else ""
        ax = sheet.slice(tile.plane, at, (black, white), title=title, points=9 if flat else 7, ends=flat or not i)
        if tile.over is not None:
            sheet.label(ax, tile.over)
        if not flat:
            sheet.corner(ax, str(tile.index))
        if known and i == barred:
            sheet.scale(ax, tile.plane, 8 if flat else 7)
    wide = sheet.width - 2 * _MARGIN
    sheet.write(display.source_text(entry.info), _MARGIN, 0.13, wide, points=10)
    sheet.write(_facts(entry, subject, "" if flat else tiles[0].plane.view), _MARGIN, 0.34, wide, dim=True)
    if foot:
        _foot(sheet, _HEAD + height + 0.12, images, (black, white), window, classes, cover)
    return sheet.figure


def _subject(entry: EntryView, place: ArrayPlace, space: Geometry, channel: int) -> _Subject:
    return _Subject(place, space, lambda region: entry.read(place.name or place.place, region), channel)


def _planes(subject: _Subject, cover: _Subject | None) -> list[_Tile]:
    views = VIEWS[-1:] if subject.is_flat else VIEWS
    return [_tile(subject, cover, view, middle(subject.space, view)) for view in views]


def _mosaic(subject: _Subject, cover: _Subject | None) -> list[_Tile]:
    view = mosaic_view(subject.space)
    return [_tile(subject, cover, view, i) for i in spread(subject.space, view, _TILES)]


def _tile(subject: _Subject, cover: _Subject | None, view: str, index: int) -> _Tile:
    over = None if cover is None else cover.plane(view, index)
    return _Tile(subject.plane(view, index), over, index, n_slices(subject.space, view))


Box: TypeAlias = tuple[float, float, float, float]


def _row(tiles: list[_Tile]) -> tuple[list[Box], float, float]:
    """Place slices side by side on one scale; return their boxes, and width and height of them all, in inches."""
    sizes = [tile.plane.extent for tile in tiles]
    scale = _LONGEST / max(max(size) for size in sizes)
    highest = max(height for height, _ in sizes) * scale
    boxes, x = [], 0.0
    for height, width in sizes:
        column = max(width * scale, 1.3)  # as wide as its title
        boxes.append(
            (x + (column - width * scale) / 2, _TITLE + (highest - height * scale) / 2, width * scale, height * scale)
        )
        x += column + _GAP
    return boxes, x - _GAP, _TITLE + highest


def _grid(tiles: list[_Tile]) -> tuple[list[Box], float, float]:
    """Place slices of one size in rows and columns, as a page would be."""
    height, width = tiles[0].plane.extent
    n = len(tiles)

    def shape(columns: int) -> float:
        return columns * width / (-(-n // columns) * height)

    columns = min(range(1, n + 1), key=lambda c: (abs(np.log(shape(c) / _GOOD)), c))
    rows = -(-n // columns)
    scale = min(_WIDEST / (columns * width), _HIGHEST / (rows * height), _LONGEST / max(width, height))
    w, h = width * scale, height * scale
    boxes = [(i % columns * (w + _SEAM), i // columns * (h + _SEAM), w, h) for i in range(n)]
    return boxes, columns * (w + _SEAM) - _SEAM, rows * (h + _SEAM) - _SEAM


def _facts(entry: EntryView, subject: _Subject, view: str) -> str:
    place, space = subject.place, subject.space
    parts = [f"{place.place} {display.shape_text(place.shape)} {place.dtype}"]
    if space.n_channels > 1:
        parts.append(f"channel {subject.channel} of {space.n_channels}")
    if space.affine is not None:
        parts.append(f"voxels {' × '.join(f'{n:.3g}' for n in space.orientation.spacing)} mm")
    if view:
        parts.append(f"{view} slices by their index")
    return display.clean(" · ".join([*parts, entry.key[:12]]))


def _foot(
    sheet: Sheet,
    top: float,
    images: list[np.ndarray],
    shown: tuple[float, float],
    window: Window,
    classes: list[LabelClass],
    cover: _Subject | None,
) -> None:
    """Draw the histogram and the legend side by side."""
    wide = sheet.width - 2 * _MARGIN
    left, height = _MARGIN, _FOOT - _ROOM
    if images:
        width = min(_HISTOGRAM, wide * (0.55 if classes else 1))
        sheet.write(_window_text(shown, window), left, top, width + 0.3, dim=True)
        sheet.histogram(images, (left + 0.1, top + _ROOM, width - 0.1, height - 0.1), shown)
        left += width + 0.45
    if cover is not None:
        n = f"{len(classes)} classes" if len(classes) != 1 else "1 class"
        of = f", channel 0 of {cover.space.n_channels}" if cover.space.n_channels > 1 else ""
        room = sheet.width - left - _MARGIN
        sheet.write(display.clean(f"{cover.place.place}: {n} in all{of}"), left, top, room, dim=True)
        sheet.legend(classes, (left, top + _ROOM, room, height))


def _window_text(shown: tuple[float, float], window: Window) -> str:
    black, white = map(number_text, shown)
    how = "1st to 99th percentile" if window is None else ""
    if isinstance(window, str):
        name = parse_window(window)
        how = name if isinstance(name, str) else ""
    return f"window {black} to {white}{f' ({how})' if how else ''} · these slices, log scale"
