"""Which axes of an array are space, how they lie in the world, and which of an item's arrays are images and labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding.chunking import Region
from zcache.encoding.orientation import Orientation, orientation, to_ras
from zcache.encoding.places import ArrayPlace, entries
from zcache.encoding.plain import plain_item, refuse
from zcache.errors import EntryDamagedError

__all__ = ["Geometry", "choose_image", "choose_label", "geometry", "is_called_label", "spatial_meta"]

_FEW_CHANNELS = 4
_2D, _3D = 2, 3
_SPATIAL_META = ("affine", "space", "spatial_shape", "original_channel_dim")
_LABEL = re.compile(r"label|seg|mask|annot|contour|\bgt\b|ground_?truth", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which axes of an array are space, and how they lie in the world.

    Attributes
    ----------
    shape : tuple of int
        Of the whole array.
    spatial : tuple of int
        Axes of space, two or three.
    channel : int or None
        Axis of channels, modalities or time.
    affine : numpy.ndarray or None
        Voxel indices to RAS millimetres; None if the item does not say.
    """

    shape: tuple[int, ...]
    spatial: tuple[int, ...]
    channel: int | None
    affine: np.ndarray | None

    @property
    def size(self) -> tuple[int, ...]:
        """Extents in space."""
        return tuple(self.shape[axis] for axis in self.spatial)

    @property
    def n_channels(self) -> int:
        """Number of channels, 1 if there is no such axis."""
        return 1 if self.channel is None else self.shape[self.channel]

    @property
    def orientation(self) -> Orientation:
        """How the axes of space lie; as if they were right, anterior and superior if the item does not say."""
        return orientation(np.eye(4) if self.affine is None else self.affine, len(self.spatial))

    def region(self, channel: int, fixed: dict[int, int]) -> Region:
        """Return the box of one channel with some spatial axes held at one index."""
        held = {self.spatial[axis]: i for axis, i in fixed.items()}
        if self.channel is not None:
            held[self.channel] = channel
        kept = set(self.spatial) - set(held)
        return tuple(
            (0, n) if axis in kept else (held.get(axis, 0), held.get(axis, 0) + 1) for axis, n in enumerate(self.shape)
        )


def spatial_meta(place: ArrayPlace) -> dict[str, Any]:
    """Return what the metadata of an array say of its place in the world, decoded; nothing where there are none."""
    found = {}
    for key, node in entries(place.node.get("meta") if isinstance(place.node, dict) else None).items():
        if key in _SPATIAL_META:
            try:
                found[key] = plain_item(node, refuse)
            except EntryDamagedError:  # no affine is so large that it were stored apart
                continue
    return found


def geometry(place: ArrayPlace, meta: dict[str, Any] | None = None) -> Geometry | None:
    """Tell the axes of an array; None if it has less than two that could be space.

    Parameters
    ----------
    place : ArrayPlace
        The array.
    meta : dict, optional
        Its metadata, decoded: of `spatial_meta`, or all of them.
    """
    shape, meta = place.shape, meta or {}
    if len(shape) < _2D or 0 in shape or not place.is_numeric:
        return None
    affine = meta.get("affine")
    if not (isinstance(affine, np.ndarray) and affine.ndim == _2D and affine.shape[0] == affine.shape[1]):
        affine = None
    affine = affine if affine is not None and affine.dtype.kind in "iuf" else None
    rank = _rank(place, affine)
    if rank == len(shape):
        spatial, channel = tuple(range(rank)), None
    elif rank + 1 == len(shape) and _channel_is_last(shape, meta):
        spatial, channel = tuple(range(rank)), rank
    else:  # axes before the channels, such as that of a batch, are shown at their first index
        spatial, channel = tuple(range(len(shape) - rank, len(shape))), len(shape) - rank - 1
    return Geometry(shape, spatial, channel, None if affine is None else to_ras(affine, meta.get("space", "RAS")))


def _rank(place: ArrayPlace, affine: np.ndarray | None) -> int:
    """Return how many axes are space."""
    n = len(place.shape)
    if n == _2D:
        return _2D
    looks_flat = place.shape[0] <= _FEW_CHANNELS and min(place.shape[1:]) > _FEW_CHANNELS
    if n == _3D:
        said = place.node.get("spatial_ndim") if isinstance(place.node, dict) else None
        if said is None and affine is not None:
            said = affine.shape[0] - 1
        # MONAI takes any tensor's first axis for channels; a whole volume without them has a 3-D affine and many.
        volume = affine is not None and affine.shape[0] > _3D and place.shape[0] > _FEW_CHANNELS
        return _3D if volume or (said is None and not looks_flat) or (said or 0) >= _3D else _2D
    return _2D if affine is not None and affine.shape[0] == _3D else _3D


def _channel_is_last(shape: tuple[int, ...], meta: dict[str, Any]) -> bool:
    """Whether a volume still is as its reader gave it, channels or time last."""
    before = meta.get("spatial_shape")
    before = before.ravel().tolist() if isinstance(before, np.ndarray) else before
    before = tuple(before) if isinstance(before, list | tuple) else ()
    if not all(isinstance(extent, int | float | np.number) for extent in before):
        return False
    n = len(shape) - 1
    channel: Any = meta.get("original_channel_dim")
    return bool(np.ndim(channel) == 0 and channel == -1) and before[:n] == shape[:n] and before[:n] != shape[1:]


def is_called_label(place: ArrayPlace) -> bool:
    """Whether an array is called a label, or something of the kind."""
    return _LABEL.search(place.place) is not None


def choose_image(found: list[tuple[ArrayPlace, Geometry]]) -> tuple[ArrayPlace, Geometry] | None:
    """Choose what to show of an item: the largest array that is not called a label."""
    return max(
        found,
        key=lambda one: (not is_called_label(one[0]), len(one[1].spatial), int(np.prod(one[1].size))),
        default=None,
    )


def choose_label(
    found: list[tuple[ArrayPlace, Geometry]], image: tuple[ArrayPlace, Geometry]
) -> tuple[ArrayPlace, Geometry] | None:
    """Choose the label that lies over an image: one of the same extents that is called so."""
    over = (one for one in found if one[0] is not image[0] and one[1].size == image[1].size and is_called_label(one[0]))
    return next(over, None)
