"""The volumes that the benchmark reads: real CT scans where they are present, else a generated one.

The scans are small, so each is mirrored along every axis (eight times the voxels, the noise stays real) and written as
``.nii.gz`` a few times, rolled by different amounts so that no two files are equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nibabel as nib
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

#: Where the real scans lie: beside the project, because their licences do not all allow redistribution.
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

#: (amount in voxels, axis) of each copy's roll.
ROLLS = ((11, 0), (23, 1), (37, 2), (53, 0))

#: What ``generate_ct`` makes for a full run: the shape of the real scan.
CT_SHAPE = (120, 126, 164)


@dataclass(frozen=True)
class Volumes:
    """The benchmark's input: items as MONAI wants them, and where they came from.

    Attributes
    ----------
    items
        One dict with the paths ``image`` and ``label`` each.
    source
        What to call the volumes in a table's heading.
    """

    items: tuple[dict[str, str], ...]
    source: str

    @property
    def nbytes(self) -> int:
        """Return the bytes of all ``.nii.gz`` files."""
        return sum(Path(path).stat().st_size for item in self.items for path in item.values())


def generate_ct(shape: tuple[int, int, int], seed: int = 0) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Make a volume with the statistics of a CT scan, and a label of one organ.

    Parameters
    ----------
    shape
        The volume's shape.
    seed
        Seed of the noise.

    Returns
    -------
    tuple
        Hounsfield units as int16 and the label as uint8: an elliptic body of fat and soft tissue, a spine, lungs and
        air, under the noise of a CT (Gaussian, slightly smoothed as a reconstruction kernel does).
    """
    rng = np.random.default_rng(seed)
    z, y, x = np.ogrid[tuple(slice(-1.0, 1.0, complex(0, n)) for n in shape)]

    def ellipsoid(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> NDArray[np.bool_]:
        distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip((z, y, x), centre, radii, strict=True))
        return np.asarray(distance < 1.0)

    hounsfield = np.full(shape, -1000.0, dtype=np.float32)
    hounsfield[ellipsoid((0, 0, 0), (0.85, 0.8, 1.4))] = -100  # fat
    hounsfield[ellipsoid((0, 0, 0), (0.78, 0.73, 1.4))] = 45  # muscle and organs
    hounsfield[ellipsoid((0.4, 0, 0.4), (0.25, 0.4, 0.5))] = -850  # lungs
    hounsfield[ellipsoid((-0.4, 0, 0.4), (0.25, 0.4, 0.5))] = -850
    hounsfield[ellipsoid((0, 0.5, 0), (0.14, 0.14, 1.4))] = 400  # spine
    vessel = ellipsoid((0.08, 0.25, 0), (0.09, 0.09, 1.2))
    hounsfield[vessel] = 180  # a contrast-filled aorta
    noise = rng.normal(0.0, 30.0, shape)
    noise = (noise + np.roll(noise, 1, 0) + np.roll(noise, 1, 1) + np.roll(noise, 1, 2)) / 2
    return np.rint(hounsfield + noise).astype(np.int16), vessel.astype(np.uint8)


def mirror(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` with its mirror image appended along each of its axes."""
    for axis in range(array.ndim):
        array = np.concatenate([array, np.flip(array, axis)], axis)
    return array


def _source_arrays(folder: Path, shape: tuple[int, int, int]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], str]:
    image_path, label_path = folder / "ct_aorta.nii.gz", folder / "ct_aorta_seg.nii.gz"
    if image_path.is_file() and label_path.is_file():
        image: Any = nib.load(image_path)
        label: Any = nib.load(label_path)
        return (
            np.asarray(image.dataobj).astype(np.int16),
            np.asarray(label.dataobj).astype(np.uint8),
            image.affine,
            "real CT (ct_aorta)",
        )
    hounsfield, organ = generate_ct(shape)
    return hounsfield, organ, np.diag([-1.5, -1.5, 1.5, 1.0]), "generated CT-like volume"


def ct_volumes(
    target: Path,
    *,
    folder: Path = SHARED_DATA,
    shape: tuple[int, int, int] = CT_SHAPE,
    copies: int = len(ROLLS),
) -> Volumes:
    """Write the benchmark's CT volumes below ``target``, unless an earlier run did.

    Parameters
    ----------
    target
        Directory for the ``.nii.gz`` files.
    folder
        Where the real scans lie; a volume is generated where they do not.
    shape
        Shape of the generated volume before mirroring.
    copies
        How many rolled copies to write.

    Returns
    -------
    Volumes
        Paths of image and label of every copy.
    """
    items = tuple(
        {key: str(target / f"ct{number}_{key}.nii.gz") for key in ("image", "label")} for number in range(copies)
    )
    stamp = target / "volumes.json"
    if stamp.is_file() and all(Path(path).is_file() for item in items for path in item.values()):
        return Volumes(items, json.loads(stamp.read_text())["source"])
    target.mkdir(parents=True, exist_ok=True)
    image, label, affine, source = _source_arrays(folder, shape)
    image, label = mirror(image), mirror(label)
    source = f"{source}, {'×'.join(map(str, image.shape))}, {copies} copies"
    for item, (amount, axis) in zip(items, ROLLS, strict=False):
        for key, array in (("image", image), ("label", label)):
            rolled = np.roll(array, amount, axis)
            nib.save(nib.Nifti1Image(rolled, affine), item[key])  # type: ignore[no-untyped-call]
    stamp.write_text(json.dumps({"source": source}))
    return Volumes(items, source)


def real_volumes(folder: Path = SHARED_DATA) -> Iterator[Path]:
    """Yield every real scan and label map in ``folder``, sorted by name; nothing where the folder is absent."""
    yield from sorted(folder.glob("*.nii.gz"))
