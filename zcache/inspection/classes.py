"""What a label consists of: its classes, how many voxels each has, and how much of the patient that is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from zcache.encoding.geometry import Geometry
from zcache.inspection.palette import codes
from zcache.inspection.planes import ReadRegion

__all__ = ["LabelClass", "label_classes"]

_SLAB = 1 << 23  # voxels read at once
_DENSE = 1 << 16
_VOLUME = 3
_MM3_PER_ML = 1000


@dataclass(frozen=True, slots=True)
class LabelClass:
    """One class of a label.

    Attributes
    ----------
    value : int
        As in the label; background, 0, is no class.
    voxels : int
        How many have it.
    ml : float or None
        Their volume; None if the item does not say how large a voxel is, or has two axes.
    """

    value: int
    voxels: int
    ml: float | None

    @property
    def size_text(self) -> str:
        """Its size in three digits: millilitres where they are known."""
        if self.ml is None:
            return f"{self.voxels:,} voxels"
        return f"{self.ml:.3g} ml" if self.ml < _MM3_PER_ML else f"{self.ml:,.0f} ml"


def label_classes(read: ReadRegion, space: Geometry, channel: int = 0) -> list[LabelClass]:
    """Count the voxels of each class in a whole label, slab by slab.

    Parameters
    ----------
    read : callable
        ``read(region)`` returns a box of the label.
    space : Geometry
        Of the label.
    channel : int
        Which channel.

    Returns
    -------
    list of LabelClass
        The largest first.
    """
    region = space.region(channel, {})
    axis = space.spatial[0]
    start, stop = region[axis]
    step = max(1, _SLAB // max(1, int(np.prod(space.size[1:]))))
    found: Counter[int] = Counter()
    for low in range(start, stop, step):
        slab = (*region[:axis], (low, min(low + step, stop)), *region[axis + 1 :])
        found.update(_counts(codes(read(slab)).ravel()))
    ml = _voxel_ml(space)
    classes = [LabelClass(value, n, None if ml is None else n * ml) for value, n in found.items()]
    return sorted(classes, key=lambda one: (-one.voxels, one.value))


def _counts(classes: np.ndarray) -> dict[int, int]:
    classes = classes[classes > 0]
    if not classes.size:
        return {}
    if int(classes.max()) < _DENSE:
        counts = np.bincount(classes)
        values = np.flatnonzero(counts)
        counts = counts[values]
    else:
        values, counts = np.unique(classes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _voxel_ml(space: Geometry) -> float | None:
    affine = space.affine
    if affine is None or len(space.spatial) != _VOLUME or affine.shape[0] != _VOLUME + 1:
        return None
    with np.errstate(all="ignore"):
        size = abs(float(np.linalg.det(affine[:_VOLUME, :_VOLUME])))
    return size / _MM3_PER_ML if np.isfinite(size) and size > 0 else None
