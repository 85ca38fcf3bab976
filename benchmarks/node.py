"""What several training processes on one node take together: their memory as the kernel counts it, epoch by epoch.

Each process is started independently, as torchrun does, and reads the same items through a DataLoader of its own with
forked workers that live on from epoch to epoch. The memory of a page that n processes map counts 1/n for each of them
(``Pss`` in /proc/PID/smaps, see proc(5)), so that sums over processes count every page once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.measure import tree_bytes
from benchmarks.peers import PIPELINES, Peer, close, open_peer
from benchmarks.rounds import Items

_PATIENCE_S = 600


@dataclass(frozen=True)
class Load:
    """What all processes together take after an epoch.

    Attributes
    ----------
    private_bytes
        All that is not the shared files of zcache: interpreters, libraries, batches, and MONAI's caches.
    mapped_bytes
        The shared files of zcache, as far as they are mapped.
    files_bytes
        The shared files of zcache, mapped or not.
    """

    private_bytes: int
    mapped_bytes: int
    files_bytes: int


def measure(peer: Peer, pipeline: str, items: Items, *, processes: int, workers: int, epochs: int) -> list[Load]:
    """Run epochs in several processes at once and return what they took after each.

    Parameters
    ----------
    peer
        Which dataset each of them opens.
    pipeline
        Key of the pipeline.
    items
        What it loads.
    processes, workers
        Independent processes, and DataLoader workers of each.
    epochs
        How many epochs.
    """
    context = get_context("spawn")
    barrier = context.Barrier(processes + 1)
    found = []
    with TemporaryDirectory(prefix="zcache-benchmark-", dir=_memory()) as memory, TemporaryDirectory() as disk:
        jobs = [
            context.Process(
                target=_train, args=(peer, pipeline, list(items), (disk, memory), workers, epochs, rank, barrier)
            )
            for rank in range(processes)
        ]
        for job in jobs:
            job.start()
        try:
            for _ in range(epochs):
                barrier.wait(_PATIENCE_S)  # all are through the epoch
                found.append(load([job.pid for job in jobs if job.pid], Path(memory)))
                barrier.wait(_PATIENCE_S)
        finally:
            barrier.abort() if len(found) < epochs else None
            for job in jobs:
                job.join(_PATIENCE_S)
    return found


def load(pids: list[int], memory: Path) -> Load:
    """Return what processes and their children take now."""
    private, mapped = 0, 0
    for pid in (one for parent in pids for one in descendants(parent)):
        for name, nbytes in mappings(pid):
            if name.startswith(str(memory)):
                mapped += nbytes
            else:
                private += nbytes
    return Load(private, mapped, tree_bytes(memory))


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that it started."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def mappings(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the file and the proportional share, in bytes, of every mapping of a process."""
    name = ""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if fields[0] == "Pss:":
                yield name, int(fields[1]) * 1024
            elif not fields[0].endswith(":"):
                name = fields[5] if len(fields) > 5 else ""


def _memory() -> str | None:
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() else None


def _train(
    peer: Peer,
    pipeline: str,
    items: list[Any],
    places: tuple[str, str],
    workers: int,
    epochs: int,
    rank: int,
    barrier: Barrier,
) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    if peer.kind == "zcache-memory":
        peer = Peer(peer.label, peer.kind, (*peer.options, ("memory_dir", places[1])))
    dataset = open_peer(peer, items, PIPELINES[pipeline].make().set_random_state(rank), Path(places[0]))
    loader: Any = DataLoader(
        dataset,
        batch_size=None,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(rank),
    )
    for _ in range(epochs):
        for _item in loader:
            pass
        barrier.wait(_PATIENCE_S)
        barrier.wait(_PATIENCE_S)
    del loader
    close(dataset)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process that was started for it."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
