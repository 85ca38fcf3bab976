"""Disk, RAM or both: what zcache's shared memory does for a training, beside MONAI's `CacheDataset`.

Run it with ``python -m benchmarks.memory`` (5 GB of memory, 4 GB of disk). It prints Markdown tables and writes every
sample to ``--json``. How each figure is obtained:

- Later epochs: one thread, one process; peers take turns item by item, and draw the same patches. The copy of a patch
  is that of numpy out of a whole float32 volume in memory, image and label; "MONAI's own work" is what an item takes
  where nothing has to be read or copied first, ``CacheDataset(copy_cache=False)``.
- Start: in processes of their own, from the constructor until the first item is there, after all packages have been
  imported and one item has been loaded without any cache.
- Node: four processes started independently, each with two workers, all reading the same items (see `benchmarks.node`).
  What MONAI's cache takes is what its processes take more than zcache's do without their shared files.
- Second run: a process fills disk and memory and ends; another one reads two epochs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zcache
from benchmarks import data, machine, node
from benchmarks.measure import median, settle
from benchmarks.peers import (
    KEYS,
    MEMORY,
    MEMORY_UNCOPIED,
    PATCH,
    PERSISTENT,
    PIPELINES,
    UNCACHED,
    ZCACHE,
    ZCACHE_BOTH,
    ZCACHE_MEMORY,
    Peer,
    close,
    finish,
    open_peer,
)
from benchmarks.report import markdown, megabytes, milliseconds, times
from benchmarks.rounds import Items, check_equal, later_epochs, rotated, threads
from zcache.encoding.narrowing import narrow

PROJECT = Path(__file__).resolve().parents[1]
PEERS = (PERSISTENT, MEMORY, MEMORY_UNCOPIED, ZCACHE, ZCACHE_BOTH, ZCACHE_MEMORY)
STARTERS = (UNCACHED, MEMORY, ZCACHE_MEMORY)


def later(pipeline: str, items: Items, caches: Path, epochs: int) -> dict[str, list[float]]:
    """Return seconds per item of every peer, one sample per epoch, after a first epoch that fills its cache."""
    make = PIPELINES[pipeline].make
    datasets = {}
    with threads(1):
        reference = make().set_random_state(0)(dict(items[0]))
        for peer in PEERS:
            cache_dir = caches / pipeline / peer.label
            dataset = open_peer(peer, items, make(), cache_dir)
            for index in range(len(items)):
                dataset[index]
            finish(dataset)
            datasets[peer] = dataset
            if isinstance(dataset, zcache.PersistentDataset):  # the same items, opened by another
                datasets[peer] = open_peer(peer, items, make(), cache_dir)
                dataset.close()
        for peer, dataset in datasets.items():
            dataset.transform.set_random_state(0)
            check_equal(reference, dataset[0], peer)
            dataset.transform.set_random_state(1)
        taken = later_epochs(datasets, epochs, title=f"{pipeline}: later epochs")
    for dataset in datasets.values():
        close(dataset)
    return {peer.label: [one.wall for one in samples] for peer, samples in taken.items()}


def patch_copies(items: Items, rounds: int) -> list[float]:
    """Return seconds that numpy takes to copy a patch of image and label out of float32 volumes in memory."""
    item = PIPELINES["window"].make()(dict(items[0]))
    arrays = [np.ascontiguousarray(item[key].numpy()) for key in KEYS]
    rng = np.random.default_rng(0)
    taken = []
    for _ in range(rounds):
        starts = [int(rng.integers(0, n - size + 1)) for n, size in zip(arrays[0].shape[1:], PATCH, strict=True)]
        box = (slice(None), *(slice(start, start + size) for start, size in zip(starts, PATCH, strict=True)))
        begun = time.perf_counter()
        _copies = [array[box].copy() for array in arrays]
        taken.append(time.perf_counter() - begun)
    return taken


def first_item(peer: Peer, pipeline: str, items: Items) -> float:
    """Return the seconds from the constructor to the first item; runs in a process of its own."""
    torch.set_num_threads(1)
    make = PIPELINES[pipeline].make
    open_peer(UNCACHED, items, make(), Path())[0]
    getattr(zcache, "CacheDataset")  # noqa: B009 - imported on first use
    settle()
    begun = time.perf_counter()
    dataset = open_peer(peer, items, make(), Path())
    dataset[0]
    taken = time.perf_counter() - begun
    close(dataset)
    return taken


def starts(pipeline: str, items: Items, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first item of every peer that starts without a cache."""
    taken: dict[str, list[float]] = {peer.label: [] for peer in STARTERS}
    for number in range(rounds):
        for peer in rotated(STARTERS, number):
            taken[peer.label].append(node.in_fresh_process(first_item, peer, pipeline, list(items)))
    return taken


def run(pipeline: str, items: Items, cache_dir: str, epochs: int) -> dict[str, int]:
    """Read epochs from disk and memory and return what was counted; runs in a process of its own."""
    with zcache.PersistentDataset(items, PIPELINES[pipeline].make(), cache_dir, memory="auto") as dataset:
        for _ in range(epochs):
            for index in range(len(items)):
                dataset[index]
        dataset.flush()
        stats = dataset.stats
    return {
        "items computed": stats.misses,
        "read from disk": stats.hits,
        "read from memory": stats.memory_hits,
        "files put into memory": stats.memory_filled,
    }


def later_table(pipelines: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Return the table of later epochs."""
    rows = [[label, *(milliseconds(median(taken[label])) for taken in pipelines.values())] for label in _labels(PEERS)]
    return markdown(["per item, one thread", *(PIPELINES[key].title for key in pipelines)], rows)


def start_table(taken: Mapping[str, list[float]]) -> str:
    """Return the table of starts."""
    plain = median(taken[UNCACHED.label])
    rows = [[label, f"{median(all_):.2f} s", times(median(all_) / plain)] for label, all_ in taken.items()]
    return markdown(["until the first item is there", "seconds", "/ no cache"], rows)


def node_table(loads: Mapping[str, Sequence[node.Load]], narrow_bytes: int) -> str:
    """Return the table of what all processes of a node take."""
    base = [one.private_bytes for one in loads[ZCACHE_MEMORY.label]]
    rows = []
    for label, taken in loads.items():
        cached = [cached_bytes(one, private) for one, private in zip(taken, base, strict=True)]
        rows.append([label, *map(megabytes, cached), times(cached[-1] / narrow_bytes)])
    header = ["cached data, all processes", *(f"epoch {i + 1}" for i in range(len(base))), "/ one narrow copy"]
    return markdown(header, rows)


def cached_bytes(load: node.Load, base_bytes: int) -> int:
    """Return what the cached data take: the shared files, mapped or not; else what is more than without any cache."""
    return load.files_bytes or load.private_bytes - base_bytes


def narrow_copy_bytes(items: Items) -> int:
    """Return the bytes of one copy of all items in their narrow types."""
    make = PIPELINES["window"].make()
    arrays = (np.ascontiguousarray(item[key].numpy()) for item in map(make, map(dict, items)) for key in KEYS)
    return sum(narrow(array)[0].nbytes for array in arrays)


def goals_table(measured: Mapping[str, Any]) -> str:
    """Return the goals, each with what was measured."""
    spatial, guided = (measured["later"].get(key) for key in ("spatial", "guided"))
    rows = []
    if spatial:
        ram = median(spatial[ZCACHE_MEMORY.label])
        least = median(measured["copies"]) + median(spatial[MEMORY_UNCOPIED.label])
        rows.append(["patch / (its copy + MONAI's own work)", times(ram / least), "≤ 2.5"])
        rows.append(["CacheDataset / patch", times(median(spatial[MEMORY.label]) / ram), "≥ 3"])
    if guided:
        ratio = median(guided[MEMORY_UNCOPIED.label]) / median(guided[ZCACHE_MEMORY.label])
        rows.append(["guided: CacheDataset(copy_cache=False) / zcache", times(ratio), "≥ 6"])
    if measured["node"]:
        shared = measured["node"][ZCACHE_MEMORY.label]
        most = max(one.files_bytes for one in shared)
        rows.append(["cached data of the node / one narrow copy", times(most / measured["narrow_bytes"]), "≤ 1.1"])
    if measured["starts"]:
        plain, ours = (median(measured["starts"][peer.label]) for peer in (UNCACHED, ZCACHE_MEMORY))
        rows.append(["first item / that of Dataset", times(ours / plain), "≤ 1.10"])
    return markdown(["goal", "measured", "wanted"], rows)


def _labels(peers: Sequence[Peer]) -> list[str]:
    return [peer.label for peer in peers]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=data.SHARED_DATA, help="folder of the real scans")
    parser.add_argument("--workdir", type=Path, default=PROJECT / "build" / "benchmarks", help="for volumes and caches")
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks" / "results" / "memory.json")
    parser.add_argument("--later", type=int, default=9, metavar="N", help="later epochs")
    parser.add_argument("--starts", type=int, default=5, metavar="N", help="rounds of starts")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="independent processes on the node")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="DataLoader workers of each process")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="epochs on the node")
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny generated volumes")
    return parser.parse_args(argv)


def say(*paragraphs: str) -> None:
    """Print paragraphs, each after a blank line, at once."""
    for paragraph in paragraphs:
        print(f"\n{paragraph}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    options = arguments(argv)
    if options.quick:
        volumes = data.ct_volumes(options.workdir / "quick", folder=options.workdir, shape=(20, 24, 28), copies=2)
        options.later, options.starts, options.processes, options.workers, options.epochs = 2, 1, 2, 1, 2
    else:
        volumes = data.ct_volumes(options.workdir / "volumes", folder=options.data)
    items, caches = volumes.items, options.workdir / "memory caches"
    facts = machine.environment(("torch", "monai", "numpy"))
    say(f"Volumes: {volumes.source}", machine.sentence(facts))
    keys = ("spatial", "guided", "window")
    measured: dict[str, Any] = {"later": {}, "narrow_bytes": narrow_copy_bytes(items)}
    try:
        for key in keys:
            measured["later"][key] = later(key, items, caches, options.later)
            shutil.rmtree(caches)
        measured["copies"] = patch_copies(items, 5 * options.later) if not options.quick else []
        say("## Later epochs", later_table(measured["later"]))
        measured["starts"] = starts("spatial", items, options.starts)
        say("## Start", start_table(measured["starts"]))
        crowd = {"processes": options.processes, "workers": options.workers, "epochs": options.epochs}
        measured["node"] = {
            peer.label: node.measure(peer, "spatial", items, **crowd) for peer in (MEMORY, ZCACHE_MEMORY)
        }
        title = f"## Memory of {options.processes} processes with {options.workers} workers each"
        say(title, node_table(measured["node"], measured["narrow_bytes"]))
        counted = [node.in_fresh_process(run, "spatial", list(items), str(caches / "runs"), n) for n in (1, 2)]
        rows = [[name, *(str(one[name]) for one in counted)] for name in counted[0]]
        say("## Second run", markdown(["", "first run, one epoch", "second run, two epochs"], rows))
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    if not options.quick:
        say("## Goals", goals_table(measured))
    measured["node"] = {label: [asdict(one) for one in taken] for label, taken in measured["node"].items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"source": volumes.source, "environment": facts, **measured, "runs": counted}
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    say(f"Every sample: {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
