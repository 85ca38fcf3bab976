"""The parts of a figure: slices, a histogram, a legend, each put where it belongs in inches. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from zcache.inspection.palette import class_colours, codes, overlay
from zcache.inspection.windows import real

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zcache.inspection.classes import LabelClass
    from zcache.inspection.planes import Plane

__all__ = ["Sheet", "number_text"]

_DPI = 130
_BACK, _INK, _DIM, _LETTER = "#16181c", "#e8e8e8", "#9aa0a6", "#ffd54f"
_EM = 0.0085  # inches that a letter is wide, on average, for each point of its size
_OUTLINE = (withStroke(linewidth=1.8, foreground="#000000b0"),)  # what is written on slices, bright ones too
_RGB = 3
_BINS = 128
_BAR = 0.3  # of a slice's width, at most
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_ROW, _COLUMN = 0.19, 1.75  # inches of a legend's rows and columns
_EDGES = (
    (0.02, 0.5, "left", "center"),
    (0.98, 0.5, "right", "center"),
    (0.5, 0.98, "center", "top"),
    (0.5, 0.02, "center", "bottom"),
)


class _Figure(Figure):
    """A figure of its own, unknown to pyplot: no backend is chosen and nothing has to be closed."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as buffer:
            self.savefig(buffer, format="png")
            return buffer.getvalue()


class Sheet:
    """A dark figure whose parts are placed in inches from its upper left corner.

    Parameters
    ----------
    width, height : float
        Inches.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure: Figure = _Figure(figsize=(width, height), facecolor=_BACK, dpi=_DPI)
        FigureCanvasAgg(self.figure)

    def write(self, text: str, x: float, y: float, width: float, *, points: float = 8, dim: bool = False) -> None:
        """Write a line whose upper left corner is given, cut off after so many inches."""
        fits = int(width / (points * _EM))
        shown = text if len(text) <= fits else f"{text[: max(1, fits - 1)]}…"
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            plain(shown),
            color=_DIM if dim else _INK,
            fontsize=points,
            va="top",
            ha="left",
        )

    def slice(
        self,
        plane: Plane,
        at: tuple[float, float, float, float],
        limits: tuple[float, float],
        *,
        title: str = "",
        points: float = 9,
        ends: bool = True,
    ) -> Axes:
        """Draw a slice into a box: left, top, width, height."""
        ax = self._axes(at)
        ax.set_axis_off()
        image = plane.image
        if image.ndim == _RGB:
            ax.imshow(np.clip(image, 0, 255).astype(np.uint8), aspect="auto")
        else:
            shown = np.nan_to_num(real(image).astype(np.float64), nan=limits[0], posinf=limits[1], neginf=limits[0])
            ax.imshow(shown, cmap="gray", vmin=limits[0], vmax=limits[1], aspect="auto")
        ax.autoscale(enable=False)
        if title:
            ax.set_title(title, color=_DIM, fontsize=points, pad=4)
        if ends:
            for end, (x, y, ha, va) in zip(plane.ends, _EDGES, strict=True):
                ax.text(
                    x,
                    y,
                    end,
                    transform=ax.transAxes,
                    color=_LETTER,
                    ha=ha,
                    va=va,
                    fontsize=points,
                    path_effects=_OUTLINE,
                )
        return ax

    @staticmethod
    def label(ax: Axes, plane: Plane) -> None:
        """Draw a label over a slice."""
        ax.imshow(overlay(codes(plane.image)), aspect="auto", interpolation="nearest")

    @staticmethod
    def scale(ax: Axes, plane: Plane, points: float = 8) -> None:
        """Draw a bar of so and so many millimetres into the lower left corner of a slice."""
        rows, columns = plane.image.shape[:2]
        width = plane.extent[1]
        length = max((n for n in _LENGTHS if n <= _BAR * width), default=None)
        if length is None:
            return
        x, y = -0.5 + 0.04 * columns, -0.5 + 0.965 * rows
        bar: dict[str, Any] = {"color": _INK, "linewidth": 1.5, "solid_capstyle": "butt", "path_effects": _OUTLINE}
        ax.plot([x, x + length / plane.spacing], [y, y], **bar)
        ax.annotate(
            f"{length} mm",
            (x, y),
            (0, 3),
            textcoords="offset points",
            color=_INK,
            fontsize=points,
            va="bottom",
            path_effects=_OUTLINE,
        )

    @staticmethod
    def corner(ax: Axes, text: str, points: float = 7) -> None:
        """Write into the upper left corner of a slice."""
        where: dict[str, Any] = {"transform": ax.transAxes, "va": "top", "ha": "left"}
        ax.text(0.03, 0.97, text, color=_INK, fontsize=points, path_effects=_OUTLINE, **where)

    def histogram(
        self, images: Sequence[np.ndarray], at: tuple[float, float, float, float], limits: tuple[float, float]
    ) -> Axes:
        """Draw how often values occur in the drawn slices, what the window shows of them bright."""
        ax = self._axes(at)
        flat = np.concatenate([np.asarray(real(image), np.float64).ravel() for image in images])
        flat = flat[np.isfinite(flat)]
        low, high = limits
        if flat.size:
            tails = np.percentile(flat, (0.1, 99.9))
            low, high = min(low, float(tails[0])), max(high, float(tails[1]))
        counts, edges = np.histogram(flat, _BINS, (low, high))
        heights = np.log1p(counts)
        ax.stairs(heights, edges, fill=True, color="#565b63")
        centres = (edges[1:] + edges[:-1]) / 2
        inside = (centres >= limits[0]) & (centres <= limits[1])
        ax.stairs(np.where(inside, heights, 0), edges, fill=True, color="#c3c8cf")
        for value in limits:
            ax.axvline(value, color=_LETTER, linewidth=1)
        ax.set_xlim(low, high)
        ax.set_ylim(0, max(1.0, float(heights.max())) * 1.08)
        ax.set_yticks([])
        ax.locator_params(axis="x", nbins=5)
        ax.tick_params(axis="x", colors=_DIM, labelsize=7, length=2, width=0.6)
        ax.set_facecolor(_BACK)
        for side, spine in ax.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color("#565b63")
        return ax

    def legend(self, classes: Sequence[LabelClass], at: tuple[float, float, float, float]) -> Axes:
        """Draw a patch, the value and the size of each class, the largest first, as many as there is room for."""
        ax = self._axes(at)
        _, _, width, height = at
        ax.set_axis_off()
        ax.set_xlim(0, width)
        ax.set_ylim(height, 0)
        rows, columns = max(1, int(height / _ROW)), max(1, int(width / _COLUMN))
        room = rows * columns
        shown = classes if len(classes) <= room else classes[: room - 1]
        for i, one in enumerate(shown):
            x, y = i // rows * _COLUMN, i % rows * _ROW
            ax.add_patch(Rectangle((x, y + 0.02), 0.14, 0.12, color=class_colours(np.array(one.value)) / 255))
            ax.text(x + 0.22, y + 0.08, str(one.value), color=_INK, fontsize=8, va="center")
            ax.text(x + 0.62, y + 0.08, one.size_text, color=_DIM, fontsize=8, va="center")
        if len(shown) < len(classes):
            x, y = (room - 1) // rows * _COLUMN, (room - 1) % rows * _ROW
            ax.text(x + 0.22, y + 0.08, f"and {len(classes) - len(shown)} more", color=_DIM, fontsize=8, va="center")
        return ax

    def _axes(self, at: tuple[float, float, float, float]) -> Axes:
        left, top, width, height = at
        box = left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height
        return self.figure.add_axes(box)


def number_text(value: float) -> str:
    """Return a value in four digits.

    Examples
    --------
    >>> number_text(-1350.0), number_text(0.12345)
    ('−1350', '0.1235')
    """
    return f"{value:.4g}".replace("-", "−")


def plain(text: str) -> str:
    """Return a text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
