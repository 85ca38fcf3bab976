"""Caches for other readers to open: that of the demo without its training, the real scans, generated arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from monai.transforms import EnsureChannelFirstd, LoadImaged, ScaleIntensityRanged, Spacingd
from rich.progress import Progress

from benchmarks.demo import Settings, make_subjects, pipeline
from tests.support import key
from zcache import Cache, PersistentDataset

__all__ = ["CODECS", "demo_cache", "generated_caches", "scan_caches"]

CODECS = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
_PRECISIONS = ("float16", "uint16", "uint8", 0.01)
_SHAPE, _CHUNKS = (1, 21, 33, 40), (8, 17, 23)  # no extent is a multiple of the chunk's
_SPECIAL = np.array([np.nan, np.inf, 0.0, -0.0], "f4")


def demo_cache(folder: Path, *, subjects: int = 2, resolution: int = 4) -> Path:
    """Cache what ``make demo`` does, of fewer and smaller volumes; `resolution` in millimetres."""
    with Progress(disable=True) as progress:
        items = make_subjects(folder / "volumes", Settings(subjects=subjects, resolution=resolution), progress)
    _fill(folder / "cache", items, pipeline(roi=16).transforms)
    return folder / "cache"


def scan_caches(scans: Path, folder: Path) -> list[Path]:
    """Cache every scan as it is loaded, each with another codec; a windowed CT, and a resampled one."""
    load = [LoadImaged("image"), EnsureChannelFirstd("image")]
    window = ScaleIntensityRanged("image", -160, 240, 0.0, 1.0, clip=True)
    resample = Spacingd("image", (1.3, 1.7, 2.1))
    caches = []
    for i, path in enumerate(sorted(scans.glob("*.nii.gz"))):
        caches.append(folder / path.name.partition(".")[0])
        _fill(caches[-1], [{"image": str(path)}], load, codec=CODECS[i % len(CODECS)])
    ct = [{"image": str(scans / "ct_aorta.nii.gz")}]
    for precision in ("lossless", *_PRECISIONS):
        caches.append(folder / f"resampled {precision}")
        _fill(caches[-1], ct, [*load, resample], precision=precision)
        _fill(caches[-1], ct, [*load, window], precision=precision)
    return caches


def generated_caches(folder: Path) -> list[Path]:
    """Cache an array for every way to be narrowed, with every codec, and every precision that loses."""
    caches = []
    for how in [*({"codec": codec} for codec in CODECS), *({"precision": precision} for precision in _PRECISIONS)]:
        caches.append(folder / "-".join(map(str, how.values())))
        with Cache(caches[-1], chunks=_CHUNKS, on_error="raise", **how) as cache:
            cache.put(key(1), {"arrays": _arrays()})
        assert cache.stats.stored == 1
    return caches


def _fill(cache_dir: Path, items: list, transforms: tuple | list, **how) -> None:
    with PersistentDataset(items, transforms, cache_dir, on_error="raise", **how) as dataset:
        for i in range(len(dataset)):
            dataset[i]
    assert dataset.stats.stored == len(items)


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def whole(low: int, high: int, dtype: str) -> np.ndarray:
        return rng.integers(low, high, _SHAPE).astype(dtype)

    def floats(dtype: str) -> np.ndarray:
        return rng.normal(0, 100, _SHAPE).astype(dtype)

    def windowed(levels: int, dtype: str) -> np.ndarray:
        found = (whole(1, levels, "i4") / (levels - 1)).astype(dtype)
        found.reshape(-1)[-_SPECIAL.size :] = _SPECIAL
        return found

    arrays = {
        "uint8": whole(0, 200, "u1"),
        "uint8 of int16": whole(0, 200, "i2"),
        "int8": whole(-100, 100, "i1"),
        "int16": whole(-1024, 3071, "i2"),
        "int16 of float32": whole(-1024, 3071, "f4"),
        "uint16 of float64": whole(0, 60000, "f8"),
        "uint16": whole(0, 60000, "u2"),
        "int32": whole(-(2**30), 2**30, "i4"),
        "uint32": whole(0, 2**32 - 1, "u4"),
        "uint8 of int64": whole(0, 3, "i8"),
        "int64": whole(-(2**62), 2**62, "i8"),
        "uint64": whole(0, 2**63 - 1, "u8"),
        "bool": whole(0, 2, "?"),
        "float32": floats("f4"),
        "float64": floats("f8"),
        "float32 of float64": floats("f4").astype("f8"),
        "table in uint8": windowed(200, "f4"),
        "table in uint16": windowed(3000, "f4"),
        "table of float64": windowed(3000, "f8"),
        "NaN payloads": np.where(whole(0, 2, "?"), whole(0x7FC00000, 0x7FFFFFFF, "u4").view("f4"), floats("f4")),
        "float16": floats("f2"),
    }
    for name, array in arrays.items():
        array[:, : _CHUNKS[0]] = -0.0 if name.startswith("table") else 0  # of code 0: these chunks are left out
    return arrays
