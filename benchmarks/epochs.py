"""Epochs over CT volumes, whole and in random patches: zcache against MONAI's datasets.

Run it with ``python -m benchmarks.epochs``. It writes its volumes and caches below ``--workdir`` (about 4 GB while it
runs), prints Markdown tables and writes every sample to ``--json``. How each figure is obtained:

- First epoch: a fresh cache directory each time, the ``.nii.gz`` files in the page cache, ``num_workers=0``. The peers
  take turns, in another order each round. Building the dataset counts, since two of the peers fill their cache there.
- Later epochs: the caches are opened anew; one thread. Peers take turns item by item. Those that end in a random crop
  draw the same patches for every peer.
- Memory: before each whole volume, the process touches and frees as much memory as is needed, because the first touch
  of memory that a virtual machine has handed back to its host is ten times as slow, for whoever comes first. Not so
  before patches: it would empty the processor's caches too, in which small reads find much of what they need.
- Cold: as root the whole page cache is dropped before each epoch, otherwise the kernel is asked to forget the caches'
  files. Bytes read from disk are those that the kernel charges to this process.
- 150 MB/s: as root, with cgroup v1, a process of its own reads under a blkio limit. The limit grants a burst after each
  pause, which would flatter small caches, so that burst is used up before each item, and the rate checked on a plain
  file. Beside it stands the figure by arithmetic: warm time + bytes read / rate, without overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged
from tqdm import tqdm

import zcache
from benchmarks import data, report
from benchmarks.measure import NFS_RATE, ReadLimit, can_drop_caches, tree_bytes, tree_files
from benchmarks.peers import PIPELINES, UNCACHED, ZCACHE, Pipeline, close, open_peer
from benchmarks.rounds import (
    Items,
    check_equal,
    cold_epochs,
    first_epoch,
    later_epochs,
    open_filled,
    rotated,
    threads,
    throttled_epochs,
)

PROJECT = Path(__file__).resolve().parents[1]

#: An item's two float32 volumes take 160 MB, and while they are decoded or copied as much again.
ITEM_MEMORY = 512 << 20

#: How far the checked disk rate may lie from the one asked for before the limit is not trusted.
RATE_TOLERANCE = 0.2


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes
    ----------
    first_rounds
        How often each peer's first epoch is repeated.
    later_epochs
        How many later epochs are measured.
    first_threads
        torch's threads in the first epoch; later epochs have one.
    system_wide
        Whether cold means the whole page cache dropped.
    throttle
        Whether to measure under a disk limit.
    memory
        Bytes of memory to have at hand for each item.
    """

    first_rounds: int
    later_epochs: int
    first_threads: int
    system_wide: bool
    throttle: bool
    memory: int


def run_first(pipeline: Pipeline, items: Items, caches: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Measure the first epochs and leave every peer's cache filled."""
    results: dict[str, dict[str, Any]] = {
        peer.label: {"first": [], "first_cpu": []} | ({"flush": []} if peer.kind == "zcache" else {})
        for peer in pipeline.peers
    }
    rounds = 1 if pipeline.patches else plan.first_rounds
    with threads(plan.first_threads), tqdm(total=rounds * len(pipeline.peers), unit="epoch") as progress:
        for peer in pipeline.peers:  # what is imported or compiled on first use is nobody's first epoch
            progress.set_description(f"{pipeline.key}: warming up")
            first_epoch(peer, items[:1], pipeline.make(), caches / peer.label)
        for number in range(rounds):
            for peer in rotated(pipeline.peers, number):
                progress.set_description(f"{pipeline.key}: first epoch, {peer.label}")
                taken, flushed = first_epoch(peer, items, pipeline.make(), caches / peer.label, plan.memory)
                results[peer.label]["first"].append(taken.wall)
                results[peer.label]["first_cpu"].append(taken.cpu)
                if peer.kind == "zcache":
                    results[peer.label]["flush"].append(flushed.wall)
                progress.update()
    return results


def run_later(pipeline: Pipeline, items: Items, caches: Path, plan: Plan, results: dict[str, dict[str, Any]]) -> float:
    """Measure the later epochs into ``results``; return the checked rate of the disk limit, 0 without one."""
    cached = [peer for peer in pipeline.peers if peer.kind != "uncached"]
    on_disk = [peer for peer in cached if peer.on_disk]
    for peer in on_disk:
        cache_dir = caches / peer.label
        results[peer.label] |= {"bytes": tree_bytes(cache_dir), "files": tree_files(cache_dir)}
    datasets = open_filled(pipeline.key, cached, items, caches)
    memory = 0 if pipeline.patches else plan.memory
    with threads(1):
        reference = pipeline.make().set_random_state(0)(dict(items[0]))
        for peer, dataset in datasets.items():
            check_equal(reference, dataset[0], peer)
            dataset.transform.set_random_state(1)
        warm = later_epochs(datasets, plan.later_epochs, memory=memory, title=f"{pipeline.key}: warm")
        cold = cold_epochs(
            {peer: datasets[peer] for peer in on_disk},
            plan.later_epochs,
            caches,
            system_wide=plan.system_wide,
            memory=memory,
            title=f"{pipeline.key}: cold",
        )
    for dataset in datasets.values():
        close(dataset)
    measured = {"warm": warm, "cold": cold}
    rate = 0.0
    if plan.throttle and ReadLimit.possible(caches):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            job = pool.submit(throttled_epochs, pipeline.key, on_disk, list(items), caches, plan.later_epochs, memory)
            rate, throttled = job.result()
        if abs(rate / NFS_RATE - 1) <= RATE_TOLERANCE:
            measured["throttled"] = throttled
    for name, taken in measured.items():
        for peer, samples in taken.items():
            results[peer.label] |= {
                name: [one.wall for one in samples],
                f"{name}_cpu": [one.cpu for one in samples],
                f"{name}_disk": [one.disk for one in samples],
            }
    return rate


def raw_bytes(pipeline: Pipeline, items: Items) -> int:
    """Return the bytes of all items' arrays as they come out of the pipeline."""
    dataset = open_peer(UNCACHED, items, pipeline.make(), Path())
    return sum(int(array.nbytes) for item in dataset for array in item.values())


def run_volumes(folder: Path, caches: Path) -> list[dict[str, Any]]:
    """Cache every real volume as it is loaded, without windowing, and return its sizes."""
    rows = []
    for path in tqdm(list(data.real_volumes(folder)), desc="volumes", unit="volume"):
        cache_dir = caches / path.name
        shutil.rmtree(cache_dir, ignore_errors=True)
        transform = Compose([LoadImaged("image"), EnsureChannelFirstd("image")])
        items = [{"image": str(path)}]
        with zcache.PersistentDataset(items, transform, cache_dir) as dataset:
            image = dataset[0]["image"]
        with zcache.PersistentDataset(items, transform, cache_dir) as dataset:
            check_equal({"image": image}, dataset[0], ZCACHE)
        rows.append(
            {
                "name": path.name.removesuffix(".nii.gz"),
                "shape": "×".join(map(str, image.shape[1:] if image.shape[0] == 1 else image.shape)),
                "nifti": path.stat().st_size,
                "raw": int(np.prod(image.shape)) * 4,
                "zcache": tree_bytes(cache_dir),
            }
        )
    return rows


def environment(plan: Plan) -> dict[str, Any]:
    """Return what the figures depend on; no names and no paths of the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "monai", "numpy", "zarr", "numcodecs")},
        "zcache": zcache.__version__,
        "first_threads": plan.first_threads,
        "later_threads": 1,
        "cold": "page cache dropped" if plan.system_wide else "posix_fadvise(DONTNEED) on the caches' files",
        "load_average_at_start": os.getloadavg()[0],
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epochs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=data.SHARED_DATA, help="folder of the real scans")
    parser.add_argument("--workdir", type=Path, default=PROJECT / "build" / "benchmarks", help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks" / "results" / "epochs.json")
    parser.add_argument("--pipelines", nargs="+", choices=sorted(PIPELINES), default=list(PIPELINES))
    parser.add_argument("--first", type=int, default=5, metavar="N", help="rounds of first epochs")
    parser.add_argument("--later", type=int, default=7, metavar="N", help="later epochs")
    parser.add_argument("--first-threads", type=int, default=1, metavar="N", help="torch threads in the first epoch")
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny generated volumes")
    return parser.parse_args(argv)


def say(*paragraphs: str) -> None:
    """Print paragraphs, each after a blank line, at once: a run takes long and its first half is worth having."""
    sys.stdout.writelines(f"\n{paragraph}\n" for paragraph in paragraphs)
    sys.stdout.flush()


def report_pipeline(pipeline: Mapping[str, Any], count: int) -> None:
    """Print a pipeline's tables."""
    results = pipeline["peers"]
    say(f"## {pipeline['title']}")
    what = "patches of image and label" if pipeline["patches"] else "image and label, whole volumes"
    if not pipeline["patches"]:
        say(f"First epoch ({count} items, num_workers=0):", report.first_epoch_table(results))
    say(
        f"Later epochs, per item ({what}, one thread); speed-up against PersistentDataset:",
        report.later_epochs_table(results),
    )
    if pipeline["checked_rate"]:
        say(f"The disk limit, checked with a plain file: {pipeline['checked_rate'] / 1e6:.0f} MB/s.")
    if not pipeline["patches"]:
        say(report.size_table(results, pipeline["nifti_bytes"], pipeline["raw_bytes"], count))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    options = arguments(argv)
    if options.quick:
        plan = Plan(1, 2, options.first_threads, system_wide=False, throttle=False, memory=0)
        volumes = data.ct_volumes(options.workdir / "quick", folder=options.workdir, shape=(20, 24, 28), copies=2)
    else:
        plan = Plan(
            options.first,
            options.later,
            options.first_threads,
            system_wide=can_drop_caches(),
            throttle=True,
            memory=ITEM_MEMORY,
        )
        volumes = data.ct_volumes(options.workdir / "volumes", folder=options.data)
    caches = options.workdir / "caches"
    facts = environment(plan)
    say(f"Volumes: {volumes.source}", ", ".join(f"{key}: {value}" for key, value in facts.items()))
    pipelines: dict[str, dict[str, Any]] = {}
    scans: list[dict[str, Any]] = []
    try:
        for key in options.pipelines:
            pipeline = PIPELINES[key]
            results = run_first(pipeline, volumes.items, caches / key, plan)
            rate = run_later(pipeline, volumes.items, caches / key, plan, results)
            pipelines[key] = {
                "title": pipeline.title,
                "patches": pipeline.patches,
                "nifti_bytes": volumes.nbytes,
                "raw_bytes": 0 if pipeline.patches else raw_bytes(pipeline, volumes.items),
                "checked_rate": rate,
                "peers": results,
            }
            shutil.rmtree(caches / key)
            report_pipeline(pipelines[key], len(volumes.items))
        if not options.quick and not all(PIPELINES[key].patches for key in options.pipelines):
            scans = run_volumes(options.data, caches)
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    facts["load_average_at_end"] = os.getloadavg()[0]
    if scans:
        say("## Every volume, loaded without windowing", report.volumes_table(scans))
    say("## Goals", report.goals_table(pipelines))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"source": volumes.source, "environment": facts, "pipelines": pipelines, "volumes": scans}
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    say(f"Every sample: {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
