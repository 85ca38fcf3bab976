"""Slices through a volume as one looks at them: anatomical planes, the right way up, in true proportions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from zcache.encoding.chunking import Region
from zcache.encoding.geometry import Geometry
from zcache.encoding.orientation import LETTERS
from zcache.errors import CacheConfigError

__all__ = ["VIEWS", "Plane", "planes", "window"]

_2D, _3D = 2, 3
VIEWS = ("sagittal", "coronal", "axial")  # named by the world axis that they stand on

ReadRegion = Callable[[Region], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One slice, as it is drawn.

    Attributes
    ----------
    view : str
        ``"sagittal"``, ``"coronal"``, ``"axial"``, or ``"image"`` for what has two axes.
    image : numpy.ndarray
        Rows from top to bottom, columns from left to right; a third axis of colours for photographs.
    aspect : float
        Height of a pixel divided by its width.
    spacing : float
        Width of a pixel in millimetres.
    ends : tuple of str
        What lies at the left, right, top and bottom; empty where it is not known.
    """

    view: str
    image: np.ndarray
    aspect: float
    spacing: float
    ends: tuple[str, str, str, str]

    @property
    def extent(self) -> tuple[float, float]:
        """Height and width in millimetres."""
        rows, columns = self.image.shape[:2]
        return rows * self.aspect * self.spacing, columns * self.spacing


def planes(read: ReadRegion, space: Geometry, channel: int = 0, views: Iterable[str] = VIEWS) -> list[Plane]:
    """Read the middle slices of a volume, or the one of an image.

    Patient's right is at the left, as in radiology, anterior left or up, superior up.

    Parameters
    ----------
    read : callable
        ``read(region)`` returns a box of the array.
    space : Geometry
        Of the array.
    channel : int
        Which channel, or point in time.
    views : iterable of str
        Which planes.

    Raises
    ------
    CacheConfigError
        There is no such channel.
    """
    if not 0 <= channel < space.n_channels:
        raise CacheConfigError(f"channel={channel} is not one of the {space.n_channels} channels, 0 to start with")
    if len(space.spatial) == _2D:
        return [_picture(read, space, channel)]
    turned = space.orientation
    found = []
    for view in views:
        through = turned.axis_of(VIEWS.index(view))
        middle = space.size[through] // 2
        fixed = {through: space.size[through] - 1 - middle if turned.flips[through] else middle}
        across, up = sorted((axis for axis in range(_3D) if axis != through), key=lambda axis: turned.axes[axis])
        slab = _flat(read(space.region(channel, fixed)), space, across, up)
        found.append(_upright(view, slab, space, across, up))
    return found


def _flat(box: np.ndarray, space: Geometry, across: int, up: int) -> np.ndarray:
    """Return a box that is one voxel thick as rows of what goes up and columns of what goes across."""
    axes = space.spatial[up], space.spatial[across]
    flat = np.moveaxis(box, axes, (-2, -1))
    return flat.reshape(flat.shape[-2:])


def _upright(view: str, flat: np.ndarray, space: Geometry, across: int, up: int) -> Plane:
    turned = space.orientation
    # Both directions are drawn from the high end to the low: right, anterior and superior come first.
    image = flat[:: 1 if turned.flips[up] else -1, :: 1 if turned.flips[across] else -1]
    sides = ("", ""), ("", "")
    if space.affine is not None:
        sides = LETTERS[turned.axes[across]], LETTERS[turned.axes[up]]
    width = turned.spacing[across]
    return Plane(view, image, turned.spacing[up] / width, width, (sides[0][1], sides[0][0], sides[1][1], sides[1][0]))


def _picture(read: ReadRegion, space: Geometry, channel: int) -> Plane:
    """Return an image of two axes: a slice of the patient if the affine says so, else a photograph or a drawing."""
    colours = space.channel is not None and space.n_channels in (3, 4) and channel == 0
    boxes = [read(space.region(c, {})) for c in (range(3) if colours else [channel])]
    if colours and boxes[0].dtype != np.uint8 and not all(_is_byte_like(box) for box in boxes):
        boxes, colours = boxes[:1], False
    affine = space.affine
    if affine is None or np.allclose(affine, np.eye(len(affine))):
        # MONAI's reader of photographs puts columns first and says that the affine is 1; other arrays have rows first.
        across, up = (1, 0) if affine is None else (0, 1)
        shown = [_flat(box, space, across, up) for box in boxes]
        return Plane("image", np.stack(shown, -1) if colours else shown[0], 1.0, 1.0, ("", "", "", ""))
    turned = space.orientation
    across, up = sorted((0, 1), key=lambda axis: turned.axes[axis])
    parts = [_upright("image", _flat(box, space, across, up), space, across, up) for box in boxes]
    return replace(parts[0], image=np.stack([part.image for part in parts], -1)) if colours else parts[0]


def _is_byte_like(box: np.ndarray) -> bool:
    return bool(box.dtype.kind in "iuf" and box.min(initial=0) >= 0 and box.max(initial=0) <= 255)  # noqa: PLR2004


def window(images: Iterable[np.ndarray]) -> tuple[float, float]:
    """Return the values that black and white stand for: the 1st and 99th percentile of what is finite.

    Examples
    --------
    >>> window([np.array([[0.0, np.nan, 10.0]])])
    (0.1, 9.9)
    """
    flat = np.concatenate([np.asarray(image, np.float64).ravel() for image in images] or [np.zeros(0)])
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return 0.0, 1.0
    low, high = (float(p) for p in np.percentile(flat, (1, 99)))
    if low == high:
        low, high = float(flat.min()), float(flat.max())
    return (low, high) if low < high else (low, low + 1)
