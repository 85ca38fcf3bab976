"""Figures of volumes: the middle slices with a label over them. Needs matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zcache.errors import CacheConfigError
from zcache.inspection import display
from zcache.inspection.planes import Geometry, Plane, choose_label, window
from zcache.inspection.subjects import picked, read_planes, shown_arrays
from zcache.inspection.values import ArrayPlace

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["draw"]

_INCHES = 4.0
_ALPHA = 0.45
_PALETTE = 10
_RGB = 3
_EDGES = (
    (0.01, 0.5, "left", "center"),
    (0.99, 0.5, "right", "center"),
    (0.5, 0.99, "center", "top"),
    (0.5, 0.01, "center", "bottom"),
)


class _Figure(Figure):
    """A figure of its own, unknown to pyplot: no backend is chosen and nothing has to be closed."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as buffer:
            self.savefig(buffer, format="png")
            return buffer.getvalue()


def draw(entry: EntryView, image: str | None = None, label: str | bool | None = None, channel: int = 0) -> Figure:
    """Draw the middle slices of an entry; see `EntryView.plot`."""
    place, space = picked(entry, image)
    slices = read_planes(entry, place, space, channel)
    over = _label(entry, (place, space), label)
    labels = read_planes(entry, *over) if over is not None else []
    widths = [plane.extent[1] for plane in slices]
    height = max(plane.extent[0] for plane in slices)
    scale = _INCHES / max(height, *widths)  # one for all planes of a figure
    size = min(max(4.0, sum(widths) * scale), 24.0), max(2.0, height * scale) + 0.9
    figure = _Figure(figsize=size, facecolor="black", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(slices), squeeze=False, width_ratios=widths)[0]
    limits = window([_real(plane.image) for plane in slices])
    top = max((int(np.max(_codes(plane.image), initial=0)) for plane in labels), default=0)
    for i, (ax, plane) in enumerate(zip(axes, slices, strict=True)):
        _draw_plane(ax, plane, limits)
        if labels:
            _draw_label(ax, labels[i], top)
    title = f"{display.source_text(entry.info)}  {place.place} {display.shape_text(place.shape)}"
    if space.n_channels > 1 and slices[0].image.ndim < _RGB:
        title += f", channel {channel} of {space.n_channels}"
    figure.suptitle(_no_math(display.clean(title)), color="white", fontsize=9)
    return figure


def _label(
    entry: EntryView, image: tuple[ArrayPlace, Geometry], label: str | bool | None
) -> tuple[ArrayPlace, Geometry] | None:
    if label is False:
        return None
    if not isinstance(label, str):
        return choose_label(shown_arrays(entry), image)
    over = picked(entry, label)
    if over[1].size != image[1].size:
        raise CacheConfigError(
            f"the label {label!r} has the extents {over[1].size} in space, the image {image[0].place!r} {image[1].size}"
        )
    return over


def _draw_plane(ax: Any, plane: Plane, limits: tuple[float, float]) -> None:
    image = plane.image
    if image.ndim == _RGB:
        ax.imshow(np.clip(image, 0, 255).astype(np.uint8), aspect=plane.aspect)
    else:
        shown = np.nan_to_num(_real(image).astype(np.float64), nan=limits[0], posinf=limits[1], neginf=limits[0])
        ax.imshow(shown, cmap="gray", vmin=limits[0], vmax=limits[1], aspect=plane.aspect, interpolation="nearest")
    ax.set_axis_off()
    ax.set_title(plane.view, color="white", fontsize=9)
    for end, (x, y, ha, va) in zip(plane.ends, _EDGES, strict=True):
        ax.text(x, y, end, transform=ax.transAxes, color="yellow", ha=ha, va=va, fontsize=9)


def _draw_label(ax: Any, plane: Plane, top: int) -> None:
    codes = _codes(plane.image)
    colours = colormaps["tab10"](np.arange(_PALETTE))
    rgba = colours[(codes - 1) % _PALETTE]
    rgba[..., 3] = np.where(codes > 0, _ALPHA, 0)
    if top:
        ax.imshow(rgba, aspect=plane.aspect, interpolation="nearest")


def _codes(image: np.ndarray) -> np.ndarray:
    """Return a label's classes as integers, whatever type it has."""
    return np.nan_to_num(_real(image).astype(np.float64), posinf=0, neginf=0).round().astype(np.int64)


def _real(image: np.ndarray) -> np.ndarray:
    return np.abs(image) if image.dtype.kind == "c" else image


def _no_math(text: str) -> str:
    return text.replace("$", r"\$")
