"""Which way a volume lies in the patient, from its affine: pure arithmetic, whatever the affine is.

World coordinates are RAS, as MONAI and NIfTI have them: the axes run to the patient's right, to anterior, to superior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LETTERS", "Orientation", "orientation", "origin", "to_ras"]

LETTERS = (("L", "R"), ("P", "A"), ("I", "S"))
"""Names of the two ends of each world axis."""

_EPS = float(np.finfo(np.float64).eps)
_FLAT = 1e-3  # axes that enclose less are taken for parallel: what divides by it stays near the size of the offset


@dataclass(frozen=True, slots=True)
class Orientation:
    """How the axes of a volume lie in the world.

    Attributes
    ----------
    axes : tuple of int
        World axis (0: right, 1: anterior, 2: superior) that each voxel axis runs along most closely; all different.
    flips : tuple of bool
        Whether each voxel axis runs against it.
    spacing : tuple of float
        Distance of neighbouring voxels along each voxel axis; 1.0 where the affine does not say.
    """

    axes: tuple[int, ...]
    flips: tuple[bool, ...]
    spacing: tuple[float, ...]

    @property
    def codes(self) -> str:
        """The end that each voxel axis runs towards, such as ``"LPS"``."""
        return "".join(LETTERS[axis][not flip] for axis, flip in zip(self.axes, self.flips, strict=True))

    def axis_of(self, world: int) -> int:
        """Return the voxel axis that runs along a world axis."""
        return self.axes.index(world)


def orientation(affine: Sequence[Sequence[float]] | np.ndarray, n_axes: int = 3) -> Orientation:
    """Work out how a volume lies in the world.

    For every affine that has a nearest axis for each of its columns, this is the orientation to which nibabel's
    ``as_closest_canonical`` undoes it. Others (singular, not finite, too small) get what can be known of them, and the
    axes that are left in their order.

    Parameters
    ----------
    affine : array-like
        Voxel indices to RAS millimetres: (n + 1) × (n + 1) for n axes or more.
    n_axes : int
        Axes of the volume: 2 or 3.

    Examples
    --------
    >>> orientation([[-2, 0, 0, 9], [0, 0, 3, 9], [0, 1, 0, 9], [0, 0, 0, 1]])
    Orientation(axes=(0, 2, 1), flips=(True, False, False), spacing=(2.0, 1.0, 3.0))
    """
    scaled, lengths, peak = _split(_linear(affine, n_axes))
    # The rotation nearest to the axes: what remains of shear would favour one of them.
    u, strengths, v = np.linalg.svd(scaled, full_matrices=False)
    kept = strengths > strengths.max() * max(scaled.shape) * _EPS
    rotation = u[:, kept] @ v[kept]
    world: dict[int, int] = {}
    flips = [False] * n_axes
    for axis in np.argsort(np.min(-(rotation**2), axis=0)).tolist():
        column = rotation[:, axis]
        if np.allclose(column, 0):
            continue  # the affine does not say
        world[axis] = nearest = int(np.argmax(np.abs(column)))
        flips[axis] = bool(column[nearest] < 0)
        rotation[nearest] = 0  # no two axes along the same
    left = [w for w in range(3) if w not in world.values()]
    for axis in range(n_axes):
        if axis not in world:
            world[axis] = left.pop(left.index(axis) if axis in left else 0)
    spacing = tuple(float(n) * peak if n > 0 else 1.0 for n in lengths)
    return Orientation(tuple(world[axis] for axis in range(n_axes)), tuple(flips), spacing)


def origin(affine: Sequence[Sequence[float]] | np.ndarray, n_axes: int = 3) -> tuple[float, ...]:
    """Return the place of the first voxel, in millimetres along the voxel axes themselves.

    These are the world's coordinates as the volume's own axes measure them: turned about the world's zero point, not
    moved. So arrays of the same orientation lie to each other as in the world, oblique or sheared ones too, whatever
    was cut off of either; a voxel axis that runs along a world axis has that axis's coordinates, and one that runs
    against it has them with the opposite sign.

    Parameters
    ----------
    affine : array-like
        As of `orientation`.
    n_axes : int
        Axes of the volume: 2 or 3.

    Returns
    -------
    tuple of float
        Always finite; 0.0 where the affine does not say.

    Examples
    --------
    >>> origin([[-2, 0, 0, 9], [0, 0, 3, 8], [0, 1, 0, 7], [0, 0, 0, 1]])
    (-9.0, 7.0, 8.0)
    """
    given = np.asarray(affine, np.float64)
    n = given.shape[0] - 1 if given.ndim == 2 and given.shape[0] == given.shape[1] else 0  # noqa: PLR2004
    if n < min(2, n_axes) or not np.isfinite(given).all():
        return (0.0,) * n_axes
    offset = np.zeros(3)
    offset[: min(3, n)] = given[: min(3, n), -1]
    peak = _power_of_two(offset)
    offset /= peak
    axes, *_ = _split(_linear(affine, n_axes))
    along = axes.T @ offset  # exact where the axes are the world's; the rest is for what is sheared
    along += np.linalg.lstsq(axes, offset - axes @ along, rcond=_FLAT)[0]
    with np.errstate(over="ignore"):
        along = along * peak
    return tuple(float(x) + 0.0 if np.isfinite(x) else 0.0 for x in along)  # + 0.0: no negative zero


def to_ras(affine: np.ndarray, space: object = "RAS") -> np.ndarray:
    """Return an affine to RAS, given the space it leads to: ``"RAS"`` or ``"LPS"``.

    Examples
    --------
    >>> to_ras(np.eye(4), "LPS").diagonal().tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    result = np.array(affine, np.float64)
    if str(space) == "LPS":
        result[:2] *= -1
    return result


def _split(linear: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the columns as directions of length 1, their lengths, and by what these are to be multiplied."""
    peak = _power_of_two(linear)  # taken out first: squares of what a damaged header holds overflow
    lengths = np.sqrt(((linear / peak) ** 2).sum(axis=0))
    return linear / peak / np.where(lengths > 0, lengths, 1), lengths, peak


def _power_of_two(numbers: np.ndarray) -> float:
    """Return the largest power of two that is no larger than the largest number; to divide by it loses no bit."""
    return float(np.ldexp(1.0, int(np.frexp(np.abs(numbers).max())[1]) - 1))


def _linear(affine: Sequence[Sequence[float]] | np.ndarray, n_axes: int) -> np.ndarray:
    """Return the 3 × n part that turns and scales; the identity in place of what is no affine."""
    given = np.asarray(affine, np.float64)
    linear = np.zeros((3, n_axes))
    n = given.shape[0] - 1 if given.ndim == 2 and given.shape[0] == given.shape[1] else 0  # noqa: PLR2004
    if n < min(2, n_axes) or not np.isfinite(given).all():
        return np.eye(3)[:, :n_axes]
    rows, columns = min(3, n), min(n_axes, n)
    linear[:rows, :columns] = given[:rows, :columns]
    return linear if linear.any() else np.eye(3)[:, :n_axes]
