"""Trains a small 3-D U-Net three times on the same volumes: without a cache, with MONAI's, with zcache.

Run it with ``make demo`` or ``python -m benchmarks.demo``. The volumes are the MNI152 T1 template with its grey- and
white-matter maps, which the ``nilearn`` wheel carries (nothing is downloaded), made into a handful of subjects by small
shifts, a smooth bias field and noise. The task is to tell grey matter, white matter and the rest apart.

The three runs differ in one line, the dataset's class. They see the same crops and flips in the same order, so their
losses must be equal to the last bit: a cache that changed a single voxel would show here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.data import PersistentDataset as MonaiPersistentDataset
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    Orientationd,
    RandFlipd,
    RandSpatialCropSamplesd,
    ScaleIntensityRangePercentilesd,
)
from monai.utils import set_determinism
from nilearn.datasets import load_mni152_gm_template, load_mni152_template, load_mni152_wm_template
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import settle, tree_bytes
from zcache import PersistentDataset

PROJECT = Path(__file__).resolve().parents[1]
KEYS = ("image", "label")
SEED = 7


@dataclass(frozen=True)
class Settings:
    """How large the demo is.

    Attributes
    ----------
    subjects
        Number of volumes.
    epochs
        Epochs of each of the three runs.
    roi
        Edge of the random crops in voxels.
    resolution
        Voxel size of the template in millimetres.
    """

    subjects: int = 8
    epochs: int = 5
    roi: int = 64
    resolution: int = 1


@dataclass
class Run:
    """What one run measured.

    Attributes
    ----------
    name
        The dataset's name in the table.
    cache
        The cache directory; None without a cache.
    epochs, waits
        Seconds per epoch, and how many of them the training loop waited for data.
    losses
        The loss of every step.
    """

    name: str
    cache: Path | None
    epochs: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _smooth(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Return a smooth field around 1, as a receive coil makes it: a product of one slow cosine per axis."""
    waves = np.ones(shape, dtype=np.float32)
    for axis, size in enumerate(shape):
        phase, strength = rng.uniform(0, 2 * np.pi), rng.uniform(0.02, 0.08)
        wave = 1 + strength * np.cos(np.linspace(0, np.pi, size, dtype=np.float32) + phase)
        waves *= wave.reshape([-1 if position == axis else 1 for position in range(len(shape))])
    return waves


def make_subjects(folder: Path, settings: Settings, progress: Progress) -> list[dict[str, str]]:
    """Write the subjects' ``.nii.gz`` files, unless an earlier run did.

    Parameters
    ----------
    folder
        Where to.
    settings
        How many, at which resolution.
    progress
        Shows how far it is.

    Returns
    -------
    list of dict
        The paths of image and label of each subject.
    """
    items = [
        {key: str(folder / f"subject{number}_{key}.nii.gz") for key in KEYS} for number in range(settings.subjects)
    ]
    stamp = folder / "subjects.json"
    made_of = [settings.subjects, settings.resolution, SEED]
    if stamp.is_file() and json.loads(stamp.read_text()) == made_of:
        return items
    folder.mkdir(parents=True, exist_ok=True)
    task = progress.add_task("writing the volumes", total=settings.subjects)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nilearn announces changes of its next versions
        maps = [
            load(resolution=settings.resolution)
            for load in (load_mni152_template, load_mni152_gm_template, load_mni152_wm_template)
        ]
    affine = maps[0].affine
    head, grey, white = (np.asarray(image.dataobj, dtype=np.float32) for image in maps)
    tissue = np.where(np.maximum(grey, white) > 0.4, np.where(grey >= white, 1, 2), 0).astype(np.uint8)
    for number, item in enumerate(items):
        rng = np.random.default_rng([SEED, number])
        image = head * _smooth(rng, head.shape) * 1000
        image += (head > 0) * rng.normal(0, 25, head.shape).astype(np.float32)
        shift = tuple(int(amount) for amount in rng.integers(-6, 7, 3))
        for key, array in (("image", np.rint(image).clip(0, 4095).astype(np.int16)), ("label", tissue)):
            rolled = np.roll(array, shift, (0, 1, 2))
            nib.save(nib.Nifti1Image(rolled, affine), item[key])  # type: ignore[no-untyped-call]
        progress.advance(task)
    stamp.write_text(json.dumps(made_of))
    return items


def pipeline(roi: int) -> Compose:
    """Return the transforms: five that are the same each time and therefore cached, then random crops and flips."""
    return Compose(
        [
            LoadImaged(KEYS),
            EnsureChannelFirstd(KEYS),
            Orientationd(KEYS, axcodes="RAS", labels=None),
            ScaleIntensityRangePercentilesd("image", lower=1, upper=99, b_min=0.0, b_max=1.0, clip=True),
            CropForegroundd(KEYS, source_key="image", allow_smaller=True),
            RandSpatialCropSamplesd(KEYS, roi_size=(roi, roi, roi), num_samples=2, random_size=False),
            RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        ]
    ).set_random_state(seed=SEED)


def network() -> UNet:
    """Return a small 3-D U-Net: 1 channel in, 3 classes out."""
    return UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)


def warm_up(items: Sequence[dict[str, str]], settings: Settings) -> None:
    """Run one step and throw it away: what is imported or set up on first use is nobody's first epoch."""
    batch = next(iter(DataLoader(Dataset(items[:1], pipeline(settings.roi)))))
    logits = network()(batch["image"].as_tensor())
    DiceCELoss(to_onehot_y=True, softmax=True)(logits, batch["label"].as_tensor()).backward()


def train(run: Run, dataset: Dataset, settings: Settings, progress: Progress) -> None:
    """Train for some epochs and note times and losses in ``run``.

    Parameters
    ----------
    run
        Where the measurements go.
    dataset
        What to train on.
    settings
        Number of epochs.
    progress
        Shows how far it is.
    """
    set_determinism(SEED)  # also the order in which the loader shuffles
    loader = DataLoader(dataset, batch_size=1, shuffle=True, num_workers=0)
    model, loss_function = network(), DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    task = progress.add_task(run.name, total=settings.epochs * len(loader))
    for epoch in range(settings.epochs):
        started = asked = time.perf_counter()
        waited, losses = 0.0, []
        for batch in loader:
            waited += time.perf_counter() - asked
            optimizer.zero_grad()
            loss = loss_function(model(batch["image"].as_tensor()), batch["label"].as_tensor())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance(task)
            asked = time.perf_counter()
        run.epochs.append(time.perf_counter() - started)
        run.waits.append(waited)
        run.losses += losses
        progress.console.print(
            f"{run.name:<26} epoch {epoch + 1}/{settings.epochs}   loss {np.mean(losses):.4f}   "
            f"{run.epochs[-1]:5.2f} s, waiting for data {waited:5.2f} s",
            highlight=False,
        )
    progress.remove_task(task)


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def results_table(runs: Sequence[Run], nifti_bytes: int) -> Table:
    """Return the closing table, one column per run."""
    steps = len(runs[0].losses) // len(runs[0].epochs)
    table = Table(title="The same training, three datasets", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(name: str, cell: Callable[[Run], str], runs: Iterable[Run] = runs) -> None:
        table.add_row(name, *(cell(run) for run in runs))

    def on_disk(run: Run) -> str:
        return "–" if run.cache is None else _size(tree_bytes(run.cache))

    def share(run: Run) -> str:
        return "–" if run.cache is None else f"{tree_bytes(run.cache) / nifti_bytes:.2f} ×"

    row("waiting for data, first epoch", lambda run: f"{run.waits[0]:.2f} s")
    row("waiting for data, later epochs (median)", lambda run: f"{np.median(run.waits[1:]):.2f} s")
    row("whole first epoch", lambda run: f"{run.epochs[0]:.2f} s")
    row("whole later epochs (median)", lambda run: f"{np.median(run.epochs[1:]):.2f} s")
    row("cache on disk", on_disk)
    row(f"  against the .nii.gz ({_size(nifti_bytes)})", share)
    row("loss, last epoch", lambda run: f"{np.mean(run.losses[-steps:]):.6f}")
    return table


def closing_words(cache_dir: Path) -> str:
    """Return where the cache is and how to look into it."""
    return f"""
The cache stays in {cache_dir} until `make clean`. Look into it:

    .venv/bin/zcache ls {cache_dir}
    .venv/bin/zcache info {cache_dir}
    .venv/bin/zcache verify {cache_dir}
"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=PROJECT / "build" / "demo", help="for volumes and caches")
    parser.add_argument("--quick", action="store_true", help="a smoke run on few small volumes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if the three runs' losses differ."""
    options = arguments(argv)
    settings = Settings(subjects=2, epochs=2, roi=16, resolution=4) if options.quick else Settings()
    console = Console()
    if not console.is_terminal:
        console.width = 110  # a log file has no width; rich would wrap at 80
    # One thread for the training steps: the other core is the data's, so that the runs can be compared.
    torch.set_num_threads(1)
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        items = make_subjects(options.workdir / ("quick" if options.quick else "volumes"), settings, progress)
        nifti_bytes = sum(Path(path).stat().st_size for item in items for path in item.values())
        caches = {name: options.workdir / name for name in ("persistent", "zcache")}
        for directory in caches.values():
            shutil.rmtree(directory, ignore_errors=True)  # a first epoch is one on an empty cache
        warm_up(items, settings)
        settle()

        uncached = Run("no cache", None)
        train(uncached, Dataset(items, pipeline(settings.roi)), settings, progress)
        settle()
        monai = Run("MONAI PersistentDataset", caches["persistent"])
        train(monai, MonaiPersistentDataset(items, pipeline(settings.roi), monai.cache), settings, progress)
        settle()
        ours = Run("zcache PersistentDataset", caches["zcache"])
        with PersistentDataset(items, pipeline(settings.roi), ours.cache) as dataset:
            train(ours, dataset, settings, progress)
    runs = (uncached, monai, ours)
    console.print(results_table(runs, nifti_bytes))
    same = all(run.losses == uncached.losses for run in runs)
    verdict = "identical to the last bit" if same else "NOT IDENTICAL"
    console.print(
        f"The losses of all {len(uncached.losses)} steps are {verdict} in the three runs "
        f"(first epoch {np.mean(uncached.losses[: settings.subjects]):.4f}, "
        f"last epoch {np.mean(uncached.losses[-settings.subjects :]):.4f})."
    )
    console.print(closing_words(caches["zcache"]), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Took {time.perf_counter() - started:.0f} s.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
