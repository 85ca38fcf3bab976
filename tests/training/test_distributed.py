"""Ranks of torch.distributed on one directory; there is no collective in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from monai.data import DistributedSampler, partition_dataset

from tests.strategies import assert_same
from tests.training.helpers import Counted, entries, fresh_context, loading, runs, staged
from zcache import PersistentDataset

RANKS = 2


def _rank(rank: int, data: list, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        ds = PersistentDataset(data, [Counted("image", f"{folder}/log"), *loading()], f"{folder}/cache")
        dist.barrier()
        sampler = DistributedSampler(ds, num_replicas=RANKS, rank=rank, shuffle=False)
        mine = [ds[i] for i in sampler]
        assert len(mine) == len(data) // RANKS
        ds.flush()
        dist.barrier()
        first = ds.stats
        everything = [ds[i] for i in range(len(data))]
        assert ds.stats.misses == first.misses
        sums = torch.tensor([item["image"].double().sum().item() for item in everything], dtype=torch.float64)
        other = sums.clone()
        dist.all_reduce(other)
        assert torch.equal(other, RANKS * sums)
        dist.barrier()
        # Both ask for the same items at the same time, of an empty directory: nobody fails, one wins.
        both = PersistentDataset(partition_dataset(data, num_partitions=1)[0], loading(), f"{folder}/both")
        dist.barrier()
        for i in range(len(data)):
            both[i]
        both.close()
        report = {"stats": [first.misses, first.stored], "both": [both.stats.stored, both.stats.already_stored]}
        Path(f"{folder}/rank{rank}.json").write_text(json.dumps(report))
        ds.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_share_a_directory(volumes, tmp_path):
    context = fresh_context()
    ranks = [context.Process(target=_rank, args=(rank, volumes, str(tmp_path))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        process.kill()  # if it hangs
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert [r["stats"] for r in reports] == [[2, 2], [2, 2]]
    assert runs(tmp_path / "log") == len(volumes)
    assert len(entries(tmp_path / "cache")) == len(volumes)
    stored, lost = (sum(r["both"][i] for r in reports) for i in (0, 1))
    assert stored == len(volumes)
    assert lost <= len(volumes)
    assert len(entries(tmp_path / "both")) == len(volumes)
    assert not staged(tmp_path / "both")
    with PersistentDataset(volumes, loading(), tmp_path / "both", on_error="raise", read_only=True) as ds:
        with PersistentDataset(volumes, loading(), None) as plain:
            for i in range(len(volumes)):
                assert_same(plain[i], ds[i])
        assert ds.stats.hits == len(volumes)
