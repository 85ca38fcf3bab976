"""How the notebooks look, and where they work: figures on a dark ground as zcache draws them, tables in Markdown."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib_inline.backend_inline import set_matplotlib_formats

from zcache.inspection.palette import overlay

BACK, INK, DIM, LINE = "#16181c", "#e8e8e8", "#9aa0a6", "#3a3f47"
GREY, ORANGE, TEAL, YELLOW, RED = "#8d949e", "#f0a35e", "#4cc9b0", "#ffd54f", "#ef6f6c"
MACHINE = "on the machine this was run on"
"""Stands beside every time."""

set_matplotlib_formats("png")
mpl.rcParams.update(
    {
        "figure.facecolor": BACK,
        "figure.dpi": 110,
        "savefig.facecolor": BACK,
        "axes.facecolor": BACK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": DIM,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": DIM,
        "ytick.color": DIM,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "text.color": INK,
        "font.size": 9,
        "legend.frameon": False,
        "legend.labelcolor": INK,
    }
)


class Workspace:
    """A temporary directory that the notebook moves into, with a place in memory of its own; both go at the end."""

    def __init__(self) -> None:
        self._before = Path.cwd()
        self._folder = tempfile.mkdtemp(prefix="zcache-notebook-")
        shm = Path("/dev/shm")
        self._memory = tempfile.mkdtemp(prefix="zcache-notebook-", dir=shm if shm.is_dir() else None)
        os.chdir(self._folder)
        os.environ["ZCACHE_MEMORY_DIR"] = self._memory  # apart from what trainings on this machine hold there
        os.environ["PYTHONPATH"] = str(self._before)  # so that scripts find volumes.py
        atexit.register(self.close)

    @property
    def memory(self) -> Path:
        """The directory for what zcache holds in memory."""
        return Path(self._memory)

    def close(self) -> None:
        """Remove both directories."""
        os.chdir(self._before)
        for folder in (self._folder, self._memory):
            shutil.rmtree(folder, ignore_errors=True)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markdown:
    """Return a table; the first column to the left, the others to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


def megabytes(nbytes: float) -> str:
    """Return bytes as megabytes in three digits or so."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f} MB"


def disk(folder: str | os.PathLike[str]) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def bars(ax: Axes, values: dict[str, float], colours: Sequence[str], unit: str, title: str) -> None:
    """Draw horizontal bars, each with its number."""
    names = list(values)
    drawn = ax.barh(names, values.values(), color=colours, height=0.62)
    ax.bar_label(drawn, [f"{_number(value)} {unit}" for value in values.values()], padding=5)
    ax.set_title(title)
    ax.invert_yaxis()
    ax.margins(x=0.22)
    ax.xaxis.set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0, labelcolor=INK)


def _number(value: float) -> str:
    """Return a number in three digits or so; what is less than a thousandth is nothing here."""
    return f"{value:,.0f}" if value >= 100 or value < 0.001 else f"{value:.3g}"


def slices(
    pictures: Sequence[np.ndarray],
    labels: Sequence[np.ndarray | None] | None = None,
    titles: Sequence[str] = (),
    window: tuple[float, float] | None = None,
    height: float = 2.7,
) -> tuple[Figure, list[Axes]]:
    """Draw slices side by side, as radiologists look at them: arrays with axes right and anterior, or superior.

    Parameters
    ----------
    pictures, labels
        (right, up) of each slice; labels are drawn over them in zcache's colours.
    titles
        One line for each.
    window
        Black and white; the 1st and 99.5th percentile of each if left out.
    height
        Inches of the highest one.
    """
    tallest = max(picture.shape[1] for picture in pictures)
    widths = [picture.shape[0] * height / tallest for picture in pictures]
    gap, head = 0.08, 0.3 if titles else 0.05
    figure = plt.figure(figsize=(sum(widths) + gap * (len(widths) + 1), height + head + 0.05))
    wide, high = figure.get_size_inches()
    axes, x = [], gap
    for i, (picture, width) in enumerate(zip(pictures, widths, strict=True)):
        tall = picture.shape[1] * height / tallest
        ax = figure.add_axes((x / wide, (0.05 + (height - tall) / 2) / high, width / wide, tall / high))
        low, top = window or np.percentile(picture, (1, 99.5))
        ax.imshow(upright(picture), cmap="gray", vmin=low, vmax=top, interpolation="bilinear")
        if labels is not None and labels[i] is not None:
            ax.imshow(overlay(upright(labels[i]).astype(int)), interpolation="nearest")
        if titles:
            ax.set_title(titles[i], fontsize=9, pad=4)
        ax.set_axis_off()
        axes.append(ax)
        x += width + gap
    return figure, axes


def upright(picture: np.ndarray) -> np.ndarray:
    """Return rows from the top down and columns from the patient's right, given axes that grow to the right and up."""
    return np.asarray(picture)[::-1, ::-1].T
