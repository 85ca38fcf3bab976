"""The pipelines that the benchmark runs, and the datasets that it compares, each opened the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from monai.data import CacheDataset, Dataset, LMDBDataset, PersistentDataset
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    Orientationd,
    RandCropByPosNegLabeld,
    RandSpatialCropd,
    ScaleIntensityRanged,
    Spacingd,
)

import zcache

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["uncached", "persistent", "lmdb", "memory", "zcache", "zcache-memory"]
KEYS = ("image", "label")
PATCH = (96, 96, 96)


def _window() -> list[Callable[..., Any]]:
    return [
        LoadImaged(KEYS),
        EnsureChannelFirstd(KEYS),
        ScaleIntensityRanged("image", -57, 164, 0.0, 1.0, clip=True),
        CropForegroundd(KEYS, source_key="image"),
        Orientationd(KEYS, axcodes="RAS", labels=None),
    ]


def window_pipeline() -> Compose:
    """Return the CT pipeline: load, window, crop the foreground, orient; nothing random."""
    return Compose(_window())


def spacing_pipeline() -> Compose:
    """Return the CT pipeline with resampling, after which the image holds true floats."""
    return Compose([*_window(), Spacingd(KEYS, pixdim=(1.4, 1.4, 1.6), mode=("bilinear", "nearest"))])


def spatial_patches_pipeline() -> Compose:
    """Return the CT pipeline followed by one random patch of each volume."""
    return Compose([*_window(), RandSpatialCropd(KEYS, PATCH, random_size=False)])


def guided_patches_pipeline() -> Compose:
    """Return the CT pipeline followed by four patches, half of them around foreground, as nnU-Net and others train."""
    crop = RandCropByPosNegLabeld(
        KEYS, "label", PATCH, pos=1, neg=1, num_samples=4, image_key="image", image_threshold=0, allow_smaller=True
    )
    return Compose([*_window(), crop])


@dataclass(frozen=True)
class Peer:
    """One dataset under test.

    Attributes
    ----------
    label
        Its name in the tables.
    kind
        Which class it is.
    options
        Arguments other than the defaults of its library.
    """

    label: str
    kind: Kind
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def on_disk(self) -> bool:
        """Tell whether later epochs read a cache from disk."""
        return self.kind in {"persistent", "lmdb", "zcache"}


UNCACHED = Peer("Dataset (no cache)", "uncached")
PERSISTENT = Peer("PersistentDataset", "persistent")
LMDB = Peer("LMDBDataset", "lmdb")
MEMORY = Peer("CacheDataset (RAM)", "memory")
ZCACHE = Peer("zcache", "zcache")
ZCACHE_PRECISION = Peer("zcache, precision=1e-4", "zcache", (("precision", 1e-4),))
ZCACHE_BOTH = Peer("zcache, disk and RAM", "zcache", (("memory", "auto"),))
ZCACHE_MEMORY = Peer("zcache.CacheDataset (RAM)", "zcache-memory")
ZCACHE_WHOLE = Peer("zcache, crop_pushdown=False", "zcache", (("crop_pushdown", False),))
MEMORY_UNCOPIED = Peer("CacheDataset(copy_cache=False)", "memory", (("copy_cache", False),))


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with the peers that run it.

    Attributes
    ----------
    key
        Its name in the JSON file.
    title
        Its name in a table's heading.
    make
        Builds the transform, anew for every dataset.
    peers
        What to compare.
    patches
        Whether a random crop follows; only later epochs are of interest then.
    """

    key: str
    title: str
    make: Callable[[], Compose]
    peers: tuple[Peer, ...]
    patches: bool = False


PIPELINES: Mapping[str, Pipeline] = {
    "window": Pipeline(
        "window",
        "CT, windowed",
        window_pipeline,
        (UNCACHED, PERSISTENT, LMDB, MEMORY, ZCACHE),
    ),
    "spacing": Pipeline(
        "spacing",
        "CT, windowed and resampled (Spacingd)",
        spacing_pipeline,
        (UNCACHED, PERSISTENT, LMDB, MEMORY, ZCACHE, ZCACHE_PRECISION),
    ),
    "spatial": Pipeline(
        "spatial",
        "CT, windowed, RandSpatialCropd(96³)",
        spatial_patches_pipeline,
        (PERSISTENT, MEMORY, MEMORY_UNCOPIED, ZCACHE_WHOLE, ZCACHE),
        patches=True,
    ),
    "guided": Pipeline(
        "guided",
        "CT, windowed, RandCropByPosNegLabeld(96³, num_samples=4, image_threshold=0)",
        guided_patches_pipeline,
        (PERSISTENT, MEMORY, MEMORY_UNCOPIED, ZCACHE_WHOLE, ZCACHE),
        patches=True,
    ),
}


def open_peer(peer: Peer, items: Sequence[Mapping[str, str]], transform: Compose, cache_dir: Path) -> Dataset:
    """Open a dataset on ``cache_dir`` with the defaults of its library.

    Parameters
    ----------
    peer
        Which dataset.
    items
        What it loads.
    transform
        The pipeline.
    cache_dir
        The directory of its cache; the peers without one ignore it.

    Returns
    -------
    Dataset
        Ready to be indexed. ``LMDBDataset`` and ``CacheDataset`` compute all items here, which belongs to their first
        epoch.
    """
    if peer.kind == "uncached":
        return Dataset(items, transform)
    if peer.kind == "persistent":
        return PersistentDataset(items, transform, cache_dir)
    if peer.kind == "lmdb":
        return LMDBDataset(items, transform, cache_dir, progress=False)
    if peer.kind == "memory":
        return CacheDataset(items, transform, progress=False, **dict(peer.options))
    if peer.kind == "zcache-memory":
        return zcache.CacheDataset(items, transform, **dict(peer.options))
    return zcache.PersistentDataset(items, transform, cache_dir, **dict(peer.options))


def finish(dataset: Dataset) -> None:
    """Wait until the dataset has written everything; only zcache writes after it has returned an item."""
    if isinstance(dataset, zcache.PersistentDataset):
        dataset.flush()


def close(dataset: Dataset) -> None:
    """Release what the dataset holds open."""
    if isinstance(dataset, (LMDBDataset, zcache.PersistentDataset)):
        dataset.close()


def unmap(dataset: Dataset) -> None:
    """Let go of memory maps: the kernel keeps their pages cached. LMDB opens its file again on the next access."""
    if isinstance(dataset, LMDBDataset):
        dataset.close()


def check_hits(dataset: Dataset) -> None:
    """Make sure that nothing was computed where a filled cache was to be read."""
    if isinstance(dataset, zcache.PersistentDataset) and dataset.stats.misses:
        raise AssertionError(f"not every item was in the cache: {dataset.stats}")
