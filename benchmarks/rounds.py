"""The loops of the benchmark: first epochs on empty caches, later ones warm, cold and under a disk limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.measure import NFS_RATE, ReadLimit, Sample, make_cold, sample, settle, warm_memory
from benchmarks.peers import PIPELINES, Peer, check_hits, close, finish, open_peer, unmap

Items = Sequence[Mapping[str, str]]


def _first(batch: list[Any]) -> Any:
    return batch[0]


def rotated(peers: Sequence[Peer], turn: int) -> list[Peer]:
    """Return the peers in the order of this turn, so that no peer always comes first or after the same one."""
    shift = turn % len(peers)
    return [*peers[shift:], *peers[:shift]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with ``count`` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_epoch(
    peer: Peer, items: Items, transform: Compose, cache_dir: Path, memory: int = 0
) -> tuple[Sample, Sample]:
    """Run one first epoch on an empty cache.

    Parameters
    ----------
    peer
        The dataset to run.
    items
        What it loads.
    transform
        The pipeline.
    cache_dir
        Its cache; emptied first.
    memory
        Bytes of memory that an item needs, see ``warm_memory``.

    Returns
    -------
    tuple
        What it took until the last item was returned, and from there until everything was on its way to disk.
    """
    shutil.rmtree(cache_dir, ignore_errors=True)
    settle()
    warm_memory(len(items) * memory)
    opened: list[Dataset] = []

    def epoch() -> None:
        opened.append(open_peer(peer, items, transform, cache_dir))
        for _ in DataLoader(opened[0], batch_size=1, num_workers=0, collate_fn=_first):
            pass

    taken = sample(epoch)
    flushed = sample(lambda: finish(opened[0]))
    close(opened[0])
    return taken, flushed


def later_epochs(
    datasets: Mapping[Peer, Dataset],
    epochs: int,
    *,
    before_epoch: Callable[[], None] = settle,
    before_item: Callable[[], None] = lambda: None,
    memory: int = 0,
    title: str = "",
) -> dict[Peer, list[Sample]]:
    """Read whole epochs from filled caches; the peers take turns item by item, so that a slow moment hits all of them.

    Parameters
    ----------
    datasets
        The peers, opened.
    epochs
        How many epochs to read.
    before_epoch, before_item
        Called before each, outside the measured time.
    memory
        Bytes of memory that an item needs, see ``warm_memory``.
    title
        What the progress bar says.

    Returns
    -------
    dict
        One sample per epoch: the mean over the items.
    """
    peers = list(datasets)
    count = len(next(iter(datasets.values())))
    taken: dict[Peer, list[Sample]] = {peer: [] for peer in peers}
    with tqdm(total=epochs * count * len(peers), desc=title, unit="item") as progress:
        for epoch in range(epochs):
            before_epoch()
            totals = {peer: Sample(0.0, 0.0, 0) for peer in peers}
            for index in range(count):
                for peer in rotated(peers, epoch + index):
                    warm_memory(memory)
                    before_item()
                    totals[peer] += sample(partial(datasets[peer].__getitem__, index))
                    progress.update()
            for dataset in datasets.values():
                check_hits(dataset)
            for peer, total in totals.items():
                taken[peer].append(Sample(total.wall / count, total.cpu / count, total.disk // count))
    return taken


def cold_epochs(
    datasets: Mapping[Peer, Dataset],
    epochs: int,
    caches: Path,
    *,
    system_wide: bool,
    before_item: Callable[[], None] = lambda: None,
    memory: int = 0,
    title: str = "",
) -> dict[Peer, list[Sample]]:
    """Read whole epochs, each from a cold page cache; the parameters are those of ``later_epochs``."""

    def before_epoch() -> None:
        settle()
        for dataset in datasets.values():
            unmap(dataset)
        make_cold([caches / peer.label for peer in datasets], system_wide=system_wide)

    return later_epochs(
        datasets, epochs, before_epoch=before_epoch, before_item=before_item, memory=memory, title=title
    )


def open_filled(pipeline: str, peers: Sequence[Peer], items: Items, caches: Path) -> dict[Peer, Dataset]:
    """Open the peers on the caches that their last first epoch left."""
    make = PIPELINES[pipeline].make
    datasets = {peer: open_peer(peer, items, make(), caches / peer.label) for peer in peers}
    for dataset in datasets.values():
        dataset.transform.set_random_state(0)  # all draw the same patches
    return datasets


def throttled_epochs(
    pipeline: str, peers: Sequence[Peer], items: Items, caches: Path, epochs: int, memory: int
) -> tuple[float, dict[Peer, list[Sample]]]:
    """Read epochs under a disk limit; runs in a process of its own, which alone is throttled."""
    torch.set_num_threads(1)
    datasets = open_filled(pipeline, peers, items, caches)
    for dataset in datasets.values():
        dataset[0]  # everything that is imported on first use

    with ReadLimit(caches, NFS_RATE) as limit:
        rate = limit.verify()
        taken = cold_epochs(
            datasets,
            epochs,
            caches,
            system_wide=True,
            before_item=limit.saturate,
            memory=memory,
            title=f"{pipeline}: 150 MB/s",
        )
    for dataset in datasets.values():
        close(dataset)
    return rate, taken


def _plain(value: Any) -> torch.Tensor:
    return value.as_tensor() if isinstance(value, MetaTensor) else torch.as_tensor(value)


def check_equal(reference: Any, item: Any, peer: Peer) -> None:
    """Make sure that a peer returns what the plain dataset returns, within the precision asked for."""
    if isinstance(reference, list):
        for one, other in zip(reference, item, strict=True):
            check_equal(one, other, peer)
        return
    precision = dict(peer.options).get("precision")
    for key, value in reference.items():
        expected, got = _plain(value), _plain(item[key])
        if precision is not None:
            worst = float((expected - got).abs().max())
            if worst > precision:
                raise AssertionError(f"{peer.label}: {key} is off by {worst}")
        elif not torch.equal(expected, got):
            raise AssertionError(f"{peer.label}: {key} differs from the uncached item")
