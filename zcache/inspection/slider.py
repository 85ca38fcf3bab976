"""Slices of an entry with sliders, in notebooks: one slice is read for each step. Needs ipywidgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import numpy as np

from zcache.encoding.geometry import Geometry
from zcache.encoding.places import ArrayPlace
from zcache.inspection import display
from zcache.inspection.palette import blended, codes, overlay
from zcache.inspection.planes import VIEWS, Plane
from zcache.inspection.slices import middle, n_slices, plane_at
from zcache.inspection.thumbnails import grey, png
from zcache.inspection.windows import PRESETS, Window, is_hounsfield, limits, real

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["SliceViewer", "show"]

_PIXELS = 320  # of the longest side of a slice
_RGB = 3
_STEPS = 200

Subject = tuple[ArrayPlace, Geometry]


def show(entry: EntryView, image: Subject, label: Subject | None, channel: int, window: Window) -> widgets.VBox:
    """Return a widget with a slice of each view."""
    return SliceViewer(entry, image, label, channel, window).box


class SliceViewer:
    """Slices with sliders for their places, the channel and the window, and a switch for the label.

    Attributes
    ----------
    box : ipywidgets.VBox
        What a notebook shows.
    pictures, places : dict of str to widget
        The image and the slider of each view; an image of two axes has one picture and no slider.
    channel, window, label : widget or None
        None where there is one channel, no window (photographs), no label.
    """

    def __init__(
        self, entry: EntryView, image: Subject, label: Subject | None, channel: int = 0, window: Window = None
    ) -> None:
        self._entry = entry
        self._image, self._label = image, label
        space = image[1]
        flat = len(space.spatial) < len(VIEWS)
        views = ("image",) if flat else VIEWS
        self._indices = {view: 0 if flat else middle(space, view) for view in views}
        first = {view: self._plane(image, view, channel) for view in views}
        values = [plane.image for plane in first.values() if plane.image.ndim < _RGB]
        self.channel = _slider("channel", channel, space.n_channels) if space.n_channels > 1 else None
        self.window = _window_slider(values, limits(window, values)) if values else None
        self.label = widgets.Checkbox(value=True, description="label", indent=False) if label else None
        self.places = (
            {} if flat else {view: _slider(view, i, n_slices(space, view)) for view, i in self._indices.items()}
        )
        longest = max(max(plane.extent) for plane in first.values())
        self.pictures = {view: _picture(plane, _PIXELS / longest) for view, plane in first.items()}
        for view, slider in self.places.items():
            slider.observe(lambda change, view=view: self._moved(view, change["new"]), names="value")
        for control in (self.channel, self.window, self.label):
            if control is not None:
                control.observe(lambda _: self.draw(*self.pictures), names="value")
        self.box = self._arranged(values)
        self._draw(first)

    def draw(self, *views: str) -> None:
        """Read slices and draw them."""
        channel = 0 if self.channel is None else int(self.channel.value)
        self._draw({view: self._plane(self._image, view, channel) for view in views})

    def _moved(self, view: str, index: int) -> None:
        self._indices[view] = index
        self.draw(view)

    def _plane(self, subject: Subject, view: str, channel: int) -> Plane:
        place, space = subject
        return plane_at(
            lambda region: self._entry.read(place.name or place.place, region),
            space,
            view,
            self._indices[view],
            channel,
        )

    def _draw(self, planes: dict[str, Plane]) -> None:
        for view, plane in planes.items():
            image = plane.image
            if image.ndim == _RGB:
                drawn = np.clip(image, 0, 255).astype(np.uint8)
            else:
                drawn = grey(image, (0.0, 255.0) if self.window is None else tuple(self.window.value))
                if self._label is not None and self.label is not None and self.label.value:
                    drawn = blended(drawn, overlay(codes(self._plane(self._label, view, 0).image)))
            self.pictures[view].value = png(drawn)

    def _arranged(self, values: list[np.ndarray]) -> widgets.VBox:
        columns = []
        for view, picture in self.pictures.items():
            below = [self.places[view]] if view in self.places else []
            columns.append(widgets.VBox([picture, *below], layout={"align_items": "center", "margin": "0 8px 0 0"}))
        title = widgets.Label(f"{display.source_text(self._entry.info)}: {display.clean(self._image[0].place)}")
        controls = [control for control in (self.channel, self.window, self.label) if control is not None]
        if values and is_hounsfield(values):
            controls += [self._preset(name) for name in PRESETS]
        return widgets.VBox([title, widgets.HBox(columns), widgets.HBox(controls)])

    def _preset(self, name: str) -> widgets.Button:
        button = widgets.Button(description=name, layout={"width": "auto"})
        button.on_click(lambda _: self._set_window(PRESETS[name]))
        return button

    def _set_window(self, window: tuple[float, float]) -> None:
        if self.window is not None:
            self.window.min, self.window.max = min(self.window.min, window[0]), max(self.window.max, window[1])
            self.window.value = window


def _slider(name: str, value: int, n: int) -> widgets.IntSlider:
    layout = {"width": f"{_PIXELS}px"}
    return widgets.IntSlider(value=value, min=0, max=n - 1, description=name, layout=layout, continuous_update=True)


def _window_slider(images: list[np.ndarray], window: tuple[float, float]) -> widgets.FloatRangeSlider:
    """Return a slider over all values of the slices, and the window, whichever reaches further."""
    finite = [flat[np.isfinite(flat)] for flat in (real(image).ravel() for image in images)]
    ends = [float(end) for flat in finite if flat.size for end in (flat.min(), flat.max())]
    low, high = min([window[0], *ends]), max([window[1], *ends])
    return widgets.FloatRangeSlider(
        value=window,
        min=low,
        max=high,
        step=(high - low) / _STEPS,
        description="window",
        readout_format=".4g",
        layout={"width": "420px"},
    )


def _picture(plane: Plane, scale: float) -> widgets.Image:
    height, width = (max(1, round(n * scale)) for n in plane.extent)
    sizes: dict[str, Any] = {"width": f"{width}px", "height": f"{height}px", "object_fit": "fill"}
    return widgets.Image(format="png", layout=sizes)
