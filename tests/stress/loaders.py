"""Training loops with DataLoader workers on one cache, ranks and workers killed at random moments.

`python -m tests.stress.loaders ROUNDS SECONDS SEED` prints figures, as `tests.stress.crash` does. The pipeline ends in
a label-guided crop, so that indexes of voxels are added to the entries while others read them. Every voxel tells where
it is, so that every patch can be checked.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import DataLoader, MetaTensor
from monai.transforms import Compose, RandCropByPosNegLabeld, Transform, map_binary_to_indices

from tests.stress.board import Board, Crew, report, until, watch
from zcache import PersistentDataset
from zcache.storage.entry import Entry
from zcache.storage.store import sweep_staging
from zcache.storage.voxels import open_sets

_RANKS = 2
_WORKERS = 2
_SLOTS = _RANKS * (1 + _WORKERS)
_ROUNDS_IN_A_FOLDER = 6
_ITEMS_IN_A_ROUND = 30
_N_ITEMS = _ROUNDS_IN_A_FOLDER * _ITEMS_IN_A_ROUND
_PATCH = (8, 8, 8)


class Volume(Transform):
    """Make image and label of item `i`: what a voxel holds says of which item it is, and where in it."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        image, label = volume(item["i"])
        return {"image": MetaTensor(image), "label": MetaTensor(label), "i": item["i"]}


def volume(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (24 + i % 3, 26, 28)
    image = (torch.arange(int(np.prod(shape)), dtype=torch.int32) * 7 + i * 1_000_003).reshape(1, *shape)
    return image, (image % 11 == i % 11).to(torch.uint8)


class Checked(torch.utils.data.Dataset[Any]):
    """A data set that checks each sample where it is made."""

    def __init__(self, ds: PersistentDataset, board: Board, rank: int) -> None:
        self.ds, self.board, self.rank = ds, board, rank

    def __len__(self) -> int:
        return len(self.ds)

    def __getitem__(self, i: int) -> Any:
        samples = self.ds[i]
        check_samples(samples, i)
        info = torch.utils.data.get_worker_info()
        self.board.add(_slot(self.rank, 0 if info is None else 1 + info.id), "reads", len(samples))
        if self.ds._cache._store.entry_path(self.ds._entry_key(self.ds.data[i])).is_dir():
            self.board.known[i] = True
        return samples


def check_samples(samples: list[dict[str, Any]], i: int) -> None:
    """Compare patches with what the whole volume holds there."""
    assert len(samples) == 2
    for sample in samples:
        assert sample["i"] == i
        corner = sample["image"].affine[:3, 3].tolist()  # of the identity, moved by the crop
        box = tuple(slice(int(a), int(a) + n) for a, n in zip(corner, _PATCH, strict=True))
        for name, whole in zip(("image", "label"), volume(i), strict=True):
            patch = sample[name]
            assert type(patch) is MetaTensor
            assert patch.dtype == whole.dtype
            assert torch.equal(patch.as_tensor(), whole[(slice(None), *box)]), f"wrong {name} of item {i} at {corner}"


def crop() -> RandCropByPosNegLabeld:
    return RandCropByPosNegLabeld(("image", "label"), "label", _PATCH, pos=1, neg=1, num_samples=2)


def data_set(folder: Path, n: int, **kwargs: Any) -> PersistentDataset:
    return PersistentDataset(
        [{"i": i} for i in range(n)], Compose([Volume(), crop()]), folder, on_error="raise", **kwargs
    )


def _slot(rank: int, process: int) -> int:
    return rank * (1 + _WORKERS) + process


def _enter(board: Board, rank: int, worker: int) -> None:
    watch()
    torch.set_num_threads(1)
    board.enter(_slot(rank, 1 + worker))


def train(folder: Path, board: Board, rank: int, n: int, seed: int) -> None:
    """One rank: epochs until it is killed. If one of its workers is, it goes on with new ones."""
    board.enter(_slot(rank, 0))
    torch.manual_seed(seed)
    ds = data_set(folder, n)
    ds[seed % n]  # the writer pool is at work when the workers fork
    while True:
        try:
            _epochs(ds, board, rank, persistent=bool(seed % 2))
        except RuntimeError as e:
            if "killed by signal" not in str(e) and "exited unexpectedly" not in str(e):
                raise
        except (EOFError, ConnectionError, FileNotFoundError):
            pass  # of torch, which fetches a tensor from a worker that was killed after it had announced it
        else:
            board.add(_slot(rank, 0), "epochs", 2)
        assert not ds.stats.skipped, ds.stats.skipped
        assert not ds.stats.damaged
        assert not ds.stats.not_indexed


def _epochs(ds: PersistentDataset, board: Board, rank: int, *, persistent: bool) -> None:
    loader = DataLoader(
        Checked(ds, board, rank),
        batch_size=None,
        shuffle=True,
        num_workers=_WORKERS,
        multiprocessing_context="fork",
        collate_fn=_as_it_is,
        worker_init_fn=functools.partial(_enter, board, rank),
        persistent_workers=persistent,
        timeout=45,
    )
    for _ in range(2):
        epoch = iter(loader)
        board.add(_slot(rank, 0), "starts", 1)
        for samples in epoch:
            check_samples(samples, int(samples[0]["i"]))


def _as_it_is(sample: Any) -> Any:
    return sample


class Folder:
    """One cache directory over some rounds, and what the driver demands of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.board = Board(_SLOTS, _N_ITEMS)
        self.there: set[int] = set()
        self.counts: Counter[str] = Counter()

    def round(self, n: int, rng: random.Random) -> None:
        crew = Crew()
        try:
            for rank in range(_RANKS):
                crew.start(functools.partial(train, self.path, self.board, rank, n, rng.getrandbits(32)))
            time.sleep(rng.uniform(0.2, 2.5))
            for _ in range(rng.randrange(4)):
                time.sleep(rng.expovariate(1 / 0.2))
                pid = self.board.pid(rng.randrange(_SLOTS))  # a rank, whose workers live on for a while, or a worker
                if pid and crew.is_member(pid):
                    os.kill(pid, signal.SIGKILL)
                    self.counts["kills"] += 1
        finally:
            ends = crew.finish()
        assert set(ends) == {-signal.SIGKILL}, f"a rank failed by itself: {ends}"
        self.counts["kills"] += _RANKS
        self.counts["rounds"] += 1
        self._check_entries(n)
        self._check_staging()

    def _check_entries(self, n: int) -> None:
        """Every entry is whole and right or absent, its index too, and none that was seen is lost."""
        with data_set(self.path, n, read_only=True) as ds:
            there = {i for i in range(n) if self._read(ds, i)}
            assert not ds.stats.damaged
        lost = (self.there | set(np.flatnonzero(self.board.known).tolist())) - there
        assert not lost, f"lost: {sorted(lost)}"
        self.counts["entries written"] += len(there - self.there)
        self.there = there

    def _read(self, ds: PersistentDataset, i: int) -> bool:
        cache, guide = ds._cache, ds._crop()

        def read(entry: Entry) -> bool:
            found = cache.load(entry)
            image, label = volume(i)
            assert found["i"] == i
            assert torch.equal(found["image"].as_tensor(), image), f"wrong bits in the image of item {i}"
            assert torch.equal(found["label"].as_tensor(), label), f"wrong bits in the label of item {i}"
            sets = open_sets(entry, guide.query(entry.tree))
            self.counts["entries without index"] += sets is None
            expected = map_binary_to_indices(label) if sets is not None else ()
            for voxels, members in zip(sets or (), expected, strict=True):
                assert len(voxels) == len(members)
                assert all(voxels[at] == members[at] for at in range(0, len(members), 997))
            return True

        found: bool = cache.using(ds._entry_key(ds.data[i]), read, False)
        self.counts["reads"] += found
        return found

    def _check_staging(self) -> None:
        parent = self.path / "staging"
        self.counts["staging left by the killed"] += len(list(parent.iterdir()))
        until(lambda: sweep_staging(parent) == 0 and not list(parent.glob("*/owner.json")), "a sweep")
        for folder in parent.iterdir():
            shutil.rmtree(folder)  # its owner died before it had said who it is; `crash` has these swept by age


def main(rounds: int, seconds: float, seed: int) -> Counter[str]:
    """Run; return the figures."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    while total["rounds"] < rounds and time.monotonic() - begun < seconds:
        with tempfile.TemporaryDirectory(prefix="zcache-stress-") as parent:
            folder = Folder(Path(parent) / "cache")
            for i in range(min(_ROUNDS_IN_A_FOLDER, rounds - total["rounds"])):
                if time.monotonic() - begun > seconds:
                    break
                folder.round((i + 1) * _ITEMS_IN_A_ROUND, rng)
            total += folder.counts
            total.update(folder.board.sums())
    total["seconds"] = round(time.monotonic() - begun)
    return total


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is killed, what was written removed
    report(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
