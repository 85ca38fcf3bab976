"""Slices at any place of a volume, beside the middle ones of `zcache.inspection.planes`."""

from __future__ import annotations

import numpy as np

from zcache.encoding.chunking import Region
from zcache.encoding.geometry import Geometry
from zcache.errors import CacheConfigError
from zcache.inspection.planes import VIEWS, Plane, ReadRegion, planes

__all__ = ["middle", "mosaic_view", "n_slices", "plane_at", "spread"]

_VOLUME = 3
_THICKER = 1.5  # how many times thicker slices are if a volume was taken slice by slice


def n_slices(space: Geometry, view: str) -> int:
    """Return how many slices there are of a view, 1 of an image of two axes."""
    return space.size[_through(space, view)] if len(space.spatial) == _VOLUME else 1


def middle(space: Geometry, view: str) -> int:
    """Return the index of the slice that `planes` draws, along the axis that the view stands on."""
    n = n_slices(space, view)
    flipped = len(space.spatial) == _VOLUME and space.orientation.flips[_through(space, view)]
    return n - 1 - n // 2 if flipped else n // 2


def plane_at(read: ReadRegion, space: Geometry, view: str, index: int, channel: int = 0) -> Plane:
    """Read one slice, drawn as `planes` draws the middle one, and no more of the array than that.

    Parameters
    ----------
    read : callable
        ``read(region)`` returns a box of the array.
    space : Geometry
        Of the array.
    view : str
        ``"sagittal"``, ``"coronal"`` or ``"axial"``; all the same for an image of two axes.
    index : int
        Along the axis of the array that the view stands on.
    channel : int
        Which channel, or point in time.

    Raises
    ------
    CacheConfigError
        There is no such slice or channel.
    """
    n = n_slices(space, view)
    if not 0 <= index < n:
        raise CacheConfigError(f"slice {index} is not one of the {n} {view} slices, 0 to start with")
    if len(space.spatial) < _VOLUME:
        return planes(read, space, channel)[0]
    axis = space.spatial[_through(space, view)]

    def moved(region: Region) -> np.ndarray:
        return read((*region[:axis], (index, index + 1), *region[axis + 1 :]))

    return planes(moved, space, channel, (view,))[0]


def mosaic_view(space: Geometry) -> str:
    """Return the view that a mosaic has: across the thick slices that the volume was taken in, axial if there are none.

    Examples
    --------
    >>> mosaic_view(Geometry((9, 9, 9), (0, 1, 2), None, np.diag([1.0, 5.0, 1.0, 1.0])))
    'coronal'
    """
    if len(space.spatial) < _VOLUME:
        return VIEWS[-1]
    turned = space.orientation
    thickness = {view: turned.spacing[_through(space, view)] for view in VIEWS}
    thickest = max(VIEWS, key=lambda view: thickness[view])
    others = [thickness[view] for view in VIEWS if view != thickest]
    return thickest if thickness[thickest] > _THICKER * max(others) else VIEWS[-1]


def spread(space: Geometry, view: str, n: int) -> list[int]:
    """Return the indices of so many slices, or of all if there are fewer, evenly apart, from the low end of the world.

    Examples
    --------
    >>> spread(Geometry((9, 9, 40), (0, 1, 2), None, np.diag([1.0, 1.0, -1.0, 1.0])), "axial", 4)
    [34, 24, 14, 4]
    """
    count = n_slices(space, view)
    n = min(n, count)
    places = [int((i + 0.5) * count / n) for i in range(n)]
    flipped = len(space.spatial) == _VOLUME and space.orientation.flips[_through(space, view)]
    return [count - 1 - i for i in places] if flipped else places


def _through(space: Geometry, view: str) -> int:
    """Return the number, among the axes of space, of the one that a view stands on."""
    return space.orientation.axis_of(VIEWS.index(view))
