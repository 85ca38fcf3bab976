"""A cache in neuroglancer, in a browser without a window: what it shows, as numbers and as a picture."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.viewers.serve import serve
from tests.viewers.tools import browser, run_node

__all__ = ["MILLIMETRES", "Shown", "show"]

MILLIMETRES = {name: [0.001, "m"] for name in "xyz"}
"""The viewer's dimensions: positions are millimetres."""


@dataclass(frozen=True)
class Shown:
    """What the viewer had to say.

    Attributes
    ----------
    space : list of list
        Name, size of the unit and unit of each dimension.
    values : list of list of str
        At each position, of each layer: a number as text, empty outside of its data.
    panels : list of list
        Left, top, width and height of each panel in the picture, in pixels.
    messages, failures : list of str
        What the viewer says; what went wrong in the page or on the way to it.
    requests : dict of str to int
        How often the store was asked, and how it answered: ``"GET 206"``.
    """

    space: list[list[Any]]
    values: list[list[str]]
    panels: list[list[int]]
    messages: list[str]
    failures: list[str]
    requests: dict[str, int]


def show(
    folder: Path,
    layers: Sequence[dict[str, Any]],
    state: dict[str, Any],
    picture: Path,
    *,
    positions: Sequence[Sequence[float]] = (),
    size: tuple[int, int] = (800, 600),
) -> Shown:
    """Draw layers.

    Parameters
    ----------
    folder : Path
        What is served.
    layers : sequence of dict
        As in neuroglancer's state; ``source`` is the path of a Zarr group or array in the folder.
    state : dict
        The rest of the state.
    picture : Path
        Where the PNG goes.
    positions : sequence of sequence of float
        Where to read values.
    size : tuple of int
        Of the picture, in pixels.
    """
    with (
        tempfile.TemporaryDirectory() as scratch,
        serve(folder) as store,
        serve(Path(scratch, "bundle")) as pages,
    ):
        run_node("bundle.mjs", str(Path(scratch, "bundle")))
        sourced = [{**layer, "source": f"{store}/{layer['source']}/|zarr3:"} for layer in layers]
        asked = {
            "browser": browser(),
            "profile": str(Path(scratch, "profile")),
            "page": f"{pages}/index.html",
            "state": {**state, "layers": sourced},
            "positions": positions,
            "picture": str(picture),
            "size": size,
        }
        return Shown(**json.loads(run_node("view.mjs", asked=asked)))
