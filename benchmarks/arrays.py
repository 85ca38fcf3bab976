"""One CT volume as the arrays that a training pipeline makes of it, and random patches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import nibabel as nib
import numpy as np
import torch
from monai.transforms import ScaleIntensityRange
from numpy.typing import NDArray

from benchmarks import data

#: Half-open (start, stop) in voxels, one per axis.
Box: TypeAlias = tuple[tuple[int, int], ...]

#: The window of soft tissue that the other benchmarks use too.
WINDOW = (-57, 164)

#: What ``Spacingd`` would do to the CT (1.5 mm to 1.4, 1.4 and 1.6 mm), as scale factors.
RESAMPLING = (1.5 / 1.4, 1.5 / 1.4, 1.5 / 1.6)

_SEED = 96


@dataclass(frozen=True)
class Arrays:
    """A CT volume and a label map, channel first.

    Attributes
    ----------
    hounsfield
        int16, as scanned.
    label
        uint8.
    source
        What to call the volume in a table's heading.
    """

    hounsfield: NDArray[np.int16]
    label: NDArray[np.uint8]
    source: str

    @property
    def loaded(self) -> NDArray[np.float32]:
        """Return the CT as MONAI's ``LoadImage`` returns it: as float32."""
        return self.hounsfield.astype(np.float32)

    @property
    def windowed(self) -> NDArray[np.float32]:
        """Return what MONAI's ``ScaleIntensityRange`` makes of it: few distinct values between 0 and 1."""
        scaled = ScaleIntensityRange(*WINDOW, b_min=0.0, b_max=1.0, clip=True)(self.loaded)
        return np.ascontiguousarray(np.asarray(scaled), dtype=np.float32)

    @property
    def resampled(self) -> NDArray[np.float32]:
        """Return the windowed CT on another grid, interpolated linearly: true floats."""
        volume = torch.from_numpy(self.windowed)[None]
        finer = torch.nn.functional.interpolate(volume, scale_factor=RESAMPLING, mode="trilinear", align_corners=False)
        return np.ascontiguousarray(finer[0].numpy())


def load(folder: Path, *, scans: Path = data.SHARED_DATA, shape: tuple[int, int, int] = data.CT_SHAPE) -> Arrays:
    """Load the volume, written below ``folder`` unless an earlier run did; see ``data.ct_volumes``."""
    volumes = data.ct_volumes(folder, folder=scans, shape=shape, copies=1)

    def array(key: str, dtype: type) -> NDArray[Any]:
        image: Any = nib.load(volumes.items[0][key])
        return np.ascontiguousarray(image.dataobj, dtype=dtype)[np.newaxis]

    return Arrays(array("image", np.int16), array("label", np.uint8), volumes.source)


def random_boxes(shape: Sequence[int], edge: int, count: int) -> list[Box]:
    """Return the boxes of random patches inside a volume, all channels each: the same in every run."""
    rng = np.random.default_rng(_SEED)
    boxes = []
    for _ in range(count):
        starts = [int(rng.integers(0, extent - edge, endpoint=True)) for extent in shape[1:]]
        boxes.append(((0, shape[0]), *((start, start + edge) for start in starts)))
    return boxes
