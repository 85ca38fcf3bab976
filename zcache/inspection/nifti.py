"""Arrays of a cache as NIfTI files. Needs nibabel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import nibabel as nib
import numpy as np

from zcache.encoding.geometry import Geometry
from zcache.encoding.places import ArrayPlace
from zcache.errors import CacheConfigError
from zcache.inspection.subjects import picked

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["export", "to_bytes"]

_SUFFIXES = (".nii", ".nii.gz")
_UNKNOWN, _SCANNER = 0, 1  # NIfTI's codes for what coordinates are
_MAX_AXES = 7
_WIDER = {"bool": "uint8", "float16": "float32"}  # types that NIfTI lacks


def export(entry: EntryView, path: Path, name: str | None = None) -> Path:
    """Write an array; see `EntryView.to_nifti`.

    Raises
    ------
    CacheConfigError
        The name of the file says another format, or NIfTI cannot hold the array.
    """
    if not path.name.endswith(_SUFFIXES):
        raise CacheConfigError(f"{path} should end in .nii.gz or .nii: only NIfTI is written")
    place, space = picked(entry, name)
    nib.save(_image(_storable(_spatial_first(entry.read(place.name or place.place), space)), space), path)
    return path


def to_bytes(entry: EntryView, place: ArrayPlace, space: Geometry) -> bytes:
    """Return an array as the bytes of a NIfTI file, in the smallest type that holds its values.

    Raises
    ------
    CacheConfigError
        NIfTI cannot hold the array.
    """
    volume = _storable(_spatial_first(entry.read(place.name or place.place), space))
    data: bytes = _image(_narrowed(volume), space).to_bytes()
    return data


def _narrowed(volume: np.ndarray) -> np.ndarray:
    if not volume.size or volume.dtype.kind not in "iuf":
        return volume
    low, high = float(volume.min()), float(volume.max())  # NaN fits nowhere
    fitting = (t for t in (np.uint8, np.int16, np.uint16) if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    smallest = next(fitting, None)
    if smallest is None:
        return volume
    narrow = volume.astype(smallest)
    return narrow if np.array_equal(narrow, volume) else volume


def _image(volume: np.ndarray, space: Geometry) -> nib.Nifti1Image:
    header = nib.Nifti1Header()
    header.set_data_dtype(volume.dtype)
    header.set_data_shape(volume.shape)
    affine, code = _affine(space)
    # Only the general form: the other one, a quaternion, has no shear, and fails on what cannot be inverted.
    header.set_sform(affine, code)
    header["pixdim"][1 : 1 + len(space.spatial)] = space.orientation.spacing
    header.set_xyzt_units("mm")
    return nib.Nifti1Image(volume, None, header)


def _spatial_first(data: np.ndarray, space: Geometry) -> np.ndarray:
    """Return an array as NIfTI has it: three axes of space, then the channels if there are several."""
    others = [axis for axis in range(data.ndim) if axis not in space.spatial]
    turned = data.transpose(*space.spatial, *others)
    spatial = (*space.size, 1)[:3]
    rest = tuple(n for n in turned.shape[len(space.spatial) :] if n > 1)
    if len(spatial) + len(rest) > _MAX_AXES:
        raise CacheConfigError(f"an array of shape {data.shape} has more axes than NIfTI can hold")
    # The fourth axis of NIfTI is time; channels stand there too, as most programs expect.
    return turned.reshape(*spatial, *rest)


def _storable(volume: np.ndarray) -> np.ndarray:
    dtype = np.dtype(_WIDER.get(volume.dtype.name, volume.dtype.name))
    if dtype.kind in "iu" and dtype.itemsize > 4 and volume.size:  # noqa: PLR2004 - few programs read 64-bit integers
        fits = np.iinfo(np.int32)
        if fits.min <= int(volume.min()) and int(volume.max()) <= fits.max:
            dtype = np.dtype(np.int32)
    return volume.astype(dtype, copy=False)


def _affine(space: Geometry) -> tuple[np.ndarray, int]:
    """Return a 4 × 4 affine, and whether it means anything."""
    affine = np.eye(4)
    if space.affine is None or not np.isfinite(space.affine).all():
        return affine, _UNKNOWN
    n = min(len(space.affine) - 1, 3)
    affine[:n, :n] = space.affine[:n, :n]
    affine[:n, 3] = space.affine[:n, -1]
    return affine, _SCANNER
