"""What tests of the data sets share; importable, since worker processes import it too."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from monai.data import Dataset
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    Invertd,
    Lambdad,
    LoadImaged,
    MapTransform,
    Orientationd,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    Randomizable,
    RandRotate90d,
    RandSpatialCropSamplesd,
    Rotate90d,
    SaveImaged,
    ScaleIntensityRanged,
    Spacingd,
    Transform,
    reset_ops_id,
)

from zcache import PersistentDataset

ROOT = Path(__file__).parents[2]
KEYS = ("image", "label")


class Shift(Transform):
    """Add a number to the value of "x"; makes a tensor large enough to become an array of the store."""

    def __init__(self, amount: float = 1.0, size: int = 5000) -> None:
        self.amount = amount
        self.size = size

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "x": torch.full((self.size,), float(data["x"])) + self.amount}


class Counted(MapTransform):
    """Count in a file how often it ran, over all processes; changes nothing."""

    def __init__(self, keys: Any, log: str) -> None:
        super().__init__(keys)
        self.log = log

    def __zcache_fingerprint__(self) -> str:
        return "counted"

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        with Path(self.log).open("ab", buffering=0) as f:
            f.write(b".")
        return dict(data)


class Draw(Randomizable, Transform):
    """Add a random number to "x"."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "x": data["x"] + self.R.uniform()}


def runs(log: str | Path) -> int:
    return Path(log).stat().st_size if Path(log).exists() else 0


def loading(keys: tuple[str, ...] = KEYS) -> list[Any]:
    return [LoadImaged(keys), EnsureChannelFirstd(keys)]


def ct_pipeline(*, spacing: bool = False) -> list[Any]:
    """The deterministic part of the benchmark's CT pipeline."""
    steps = [
        *loading(),
        ScaleIntensityRanged("image", -57, 164, 0.0, 1.0, clip=True),
        CropForegroundd(KEYS, source_key="image"),
        Orientationd(KEYS, axcodes="RAS", labels=None),
    ]
    return [*steps, Spacingd(KEYS, (1.4, 1.4, 1.6), mode=("bilinear", "nearest"))] if spacing else steps


def random_part() -> list[Any]:
    return [
        RandCropByPosNegLabeld(KEYS, "label", (12, 12, 8), pos=1, neg=1, num_samples=2, image_key="image"),
        RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        RandRotate90d(KEYS, prob=0.5, max_k=3, spatial_axes=(0, 1)),
        RandGaussianNoised("image", prob=0.7, std=0.1),
    ]


def sampling_part() -> list[Any]:
    return [
        RandSpatialCropSamplesd(KEYS, (10, 9, 8), num_samples=3, random_size=False),
        RandFlipd(KEYS, prob=0.5, spatial_axis=1),
        Lambdad("image", torch.neg),
    ]


def without_ids(item: Any) -> Any:
    """Forget, in place, the `id()` of transforms in traces, which differs between any two runs."""
    reset_ops_id(item)
    return item


def plain(data: list[Any], transform: Any) -> list[Any]:
    """Compute what MONAI's plain data set gives."""
    return without_ids(list(Dataset(data, transform)))


def entries(cache_dir: str | Path) -> list[Path]:
    """Published entries, sorted by name."""
    root = Path(cache_dir) / "cache.zarr"
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def bytes_under(folder: str | Path) -> int:
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def staged(cache_dir: str | Path) -> list[Path]:
    """What is left in the staging directory."""
    folder = Path(cache_dir) / "staging"
    return list(folder.iterdir()) if folder.is_dir() else []


def stored_arrays(cache_dir: str | Path) -> dict[str, Any]:
    """Arrays by name, of all entries, as zarr-python sees them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(Path(cache_dir) / "cache.zarr", mode="r")
        members = ((f"{key}/{path}", node) for key, entry in group.groups() for path, node in entry.members(None))
        return {path: node for path, node in members if isinstance(node, zarr.Array)}


def fresh_context() -> Any:
    """A forkserver that has torch and MONAI imported and nothing else: fresh processes in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a module's function in a process that never saw a data set; return or raise what it does."""
    with ProcessPoolExecutor(1, mp_context=fresh_context()) as pool:
        return pool.submit(_strictly, function, args).result(120)


def _strictly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


def python(code: str, *args: object, **env: str) -> Any:
    """Run a script in an interpreter of its own, warnings of zcache being errors; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def first_item(data: list[Any], transform: list[Any], cache_dir: str, **kwargs: Any) -> tuple[Any, Any]:
    """Return item 0 and the counters of a data set made for it."""
    with PersistentDataset(data, transform, cache_dir, **kwargs) as ds:
        return ds[0], ds.stats


def numpy_of(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)


def invert_and_save(data: list[Any], cache_dir: str | None, out: str) -> dict[str, int]:
    """Load, rotate, cache; then undo the rotation and save, as inference scripts do."""
    pipeline = Compose([*loading(), Rotate90d(KEYS, k=1, spatial_axes=(0, 1)), Orientationd(KEYS, "PIR", labels=None)])
    after = Compose(
        [
            Invertd(KEYS, transform=pipeline, orig_keys=KEYS, nearest_interp=False),
            SaveImaged(
                KEYS,
                output_dir=out,
                output_postfix="saved",
                output_ext=".nii",
                separate_folder=False,
                resample=False,
                print_log=False,
            ),
        ]
    )
    with PersistentDataset(data, pipeline, cache_dir) as ds:
        for i in range(len(data)):
            after(ds[i])
    return {"hits": ds.stats.hits, "misses": ds.stats.misses}
