"""Caches to look into, filled without a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import zcache
from tests.support import ct_like, key

STEPS = [
    {"transform": "LoadImaged", "module": "monai.transforms", "parameters": {"keys": ["image", "label"]}},
    {
        "transform": "Spacingd",
        "module": "monai.transforms",
        "parameters": {"keys": ["image", "label"], "pixdim": "ndarray float64 (3,) [1.0, 1.0, 2.0]", "lazy": False},
    },
]
OTHER_STEPS = [STEPS[0], {**STEPS[1], "parameters": {**STEPS[1]["parameters"], "pixdim": [3.0, 3.0, 3.0]}}]


def about(i: int, steps=STEPS) -> dict:
    return {"source": [f"/data/patient_{i:03}/ct.nii.gz", f"/data/patient_{i:03}/seg.nii.gz"], "pipeline": steps}


def item(i: int) -> dict:
    image = ct_like(seed=i).astype(np.float32)
    return {"image": image, "label": (image > 500).astype(np.uint8), "id": f"P{i:03}", "age": np.int64(40 + i)}


def fill(folder: Path, items: dict, described=about, **kwargs) -> Path:
    with zcache.Cache(folder, on_error="raise", **kwargs) as cache:
        for name, value in items.items():
            cache.put(name, value, described(int(name, 16)))
    return folder


def three_entries(folder: Path) -> Path:
    """Three entries of two pipelines; keys 0…1, 0…2 and f…f."""
    fill(folder, {key(1): item(1), key(2): item(2)})
    return fill(folder, {"f" * 32: item(3)}, lambda _: about(3, OTHER_STEPS))
