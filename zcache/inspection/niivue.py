"""Entries in NiiVue, the WebGL viewer, in notebooks. Needs ipyniivue and nibabel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from ipyniivue import NiiVue, Volume

from zcache.encoding.geometry import Geometry
from zcache.encoding.places import ArrayPlace
from zcache.inspection.classes import label_classes
from zcache.inspection.nifti import to_bytes
from zcache.inspection.palette import class_colours
from zcache.inspection.subjects import read_planes
from zcache.inspection.windows import Window, limits

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["show"]

_HEIGHT = 480  # pixels
_OPACITY = 0.5
_MOST_COLOURS = 4096  # a table for each value up to the largest

Subject = tuple[ArrayPlace, Geometry]


def show(entry: EntryView, image: Subject, label: Subject | None, channel: int, window: Window) -> NiiVue:
    """Return a widget with the image and the label over it, both handed over as NIfTI in memory."""
    black, white = limits(window, [plane.image for plane in read_planes(entry, *image, channel)])
    volumes = [
        Volume(
            data=to_bytes(entry, *image),
            name=f"{image[0].place}.nii",
            colormap="gray",
            cal_min=black,
            cal_max=white,
            frame_4d=channel,
        )
    ]
    if label is not None:
        volumes.append(_label(entry, *label))
    widget = NiiVue(height=_HEIGHT, is_radiological_convention=True)
    widget.load_volumes(volumes)
    return widget


def _label(entry: EntryView, place: ArrayPlace, space: Geometry) -> Volume:
    volume = Volume(data=to_bytes(entry, place, space), name=f"{place.place}.nii", opacity=_OPACITY)
    classes = label_classes(lambda region: entry.read(place.name or place.place, region), space)
    highest = max((one.value for one in classes), default=0)
    if 0 < highest <= _MOST_COLOURS:
        values = np.arange(highest + 1)
        red, green, blue = class_colours(values).T.tolist()
        volume.set_colormap_label(
            {
                "R": red,
                "G": green,
                "B": blue,
                "A": np.where(values > 0, 255, 0).tolist(),
                "I": values.tolist(),
                "labels": ["", *map(str, values[1:].tolist())],
            }
        )
    else:
        volume.colormap = "red"
    return volume
