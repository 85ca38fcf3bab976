"""Generated patients, loaded and cached as a training would: what ``zcache demo`` looks at.

Run as ``python -m zcache.training.example FOLDER``. Makes ``data/`` and ``cache/`` in it and prints a line for each
step that is done, of the form ``3/10 what``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["fill"]

_PATIENTS = 4
_RETRAINED = 2  # patients that a second pipeline saw
_SHAPE, _SPACING = (104, 84, 72), (3.5, 3.5, 4.0)
_AIR, _NOISE = -1000, 14
_LUNG, _SPINE, _HEART, _LIVER, _LESION = 1, 2, 3, 4, 5


def patient(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return something like a CT of a chest, int16 (x, y, z) in Hounsfield units, and its label, uint8.

    The axes run to the patient's left, to posterior and to superior.
    """
    rng = np.random.default_rng(seed)
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in _SHAPE), indexing="ij")
    girth = 1 + 0.06 * rng.normal()

    def ball(cx: float, cy: float, cz: float, rx: float, ry: float, rz: float) -> np.ndarray:
        inside: np.ndarray = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + ((z - cz) / rz) ** 2 < 1
        return inside

    torso = (x / (0.9 * girth)) ** 2 + (y / (0.78 * girth)) ** 2 < 1
    inner = (x / (0.8 * girth)) ** 2 + (y / (0.67 * girth)) ** 2 < 1
    lungs = ball(-0.4, 0, 0.35, 0.32, 0.5, 0.75) | ball(0.4, 0, 0.35, 0.32, 0.5, 0.75)
    heart = ball(0.12, -0.15, 0.1, 0.27, 0.3, 0.33)
    liver = ball(-0.25, -0.05, -0.75, 0.5, 0.5, 0.45) & inner
    spine = (x / 0.14) ** 2 + ((y - 0.5) / 0.14) ** 2 < 1
    cx, cz = -0.4 + 0.1 * rng.normal(), 0.5 + 0.15 * rng.normal()
    lesion = ball(float(cx), 0.1, float(cz), *(0.06 + 0.05 * rng.random(3)))
    image = np.full(_SHAPE, _AIR, np.float32)
    label = np.zeros(_SHAPE, np.uint8)
    for where, value, code in (
        (torso, -95, 0),
        (inner, 45, 0),
        (lungs, -830, _LUNG),
        (heart, 150, _HEART),
        (liver, 95, _LIVER),
        (spine, 420, _SPINE),
        (lesion, 30, _LESION),
    ):
        image[where] = value
        label[where] = code
    image[torso] += rng.normal(0, _NOISE, int(torso.sum()))
    return image.round().astype(np.int16), label


def fill(folder: Path) -> Iterator[str]:
    """Make patients and cache them by two pipelines, the second for some of them; yield what is done.

    Parameters
    ----------
    folder : Path
        Is there; gets ``data/`` and ``cache/``.
    """
    import nibabel as nib  # noqa: PLC0415 - of the extra "inspect"
    from monai.transforms import (  # noqa: PLC0415
        EnsureChannelFirstd,
        LoadImaged,
        Orientationd,
        RandSpatialCropd,
        ScaleIntensityRanged,
    )

    from zcache.training.dataset import PersistentDataset  # noqa: PLC0415

    keys = ["image", "label"]
    items = []
    for i in range(_PATIENTS):
        own = folder / "data" / f"patient_{i + 1:03}"
        own.mkdir(parents=True)
        item = {"image": str(own / "ct.nii.gz"), "label": str(own / "organs.nii.gz"), "patient": own.name}
        for name, array in zip(keys, patient(i), strict=True):
            nib.save(nib.Nifti1Image(array, np.diag([-_SPACING[0], -_SPACING[1], _SPACING[2], 1.0])), item[name])
        items.append(item)
        yield f"made {own.name}"
    load = [LoadImaged(keys), EnsureChannelFirstd(keys), Orientationd(keys, "RAS", labels=None)]
    window = ScaleIntensityRanged("image", -200, 300, 0, 1, clip=True)
    crop = RandSpatialCropd(keys, (48, 48, 48), random_size=False)
    for pipeline, chosen in (([*load, crop], items), ([*load, window, crop], items[:_RETRAINED])):
        with PersistentDataset(chosen, pipeline, cache_dir=folder / "cache") as dataset:
            for i, item in enumerate(chosen):
                _ = dataset[i]
                yield f"cached {item['patient']}"


def main() -> None:
    """Make the example in the folder that the command line names."""
    warnings.simplefilter("ignore")  # of other packages; nobody could act on them here
    n = 2 * _PATIENTS + _RETRAINED
    for i, what in enumerate(fill(Path(sys.argv[1])), 1):
        sys.stdout.write(f"{i}/{n} {what}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
