"""Memory shared by workers and ranks however they start and end: one copy, the right bits, and nothing left of it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import DataLoader
from monai.transforms import Transform

import zcache.storage.pool
from tests.strategies import assert_same
from tests.stress.board import fork
from tests.training.helpers import ROOT, Counted, runs
from tests.training.test_dataloader import as_it_is, context, until
from zcache import Cache, CacheDataset, PersistentDataset, ZCacheWarning

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
DATA = [{"i": i} for i in range(12)]


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


class Ramp(Transform):
    """Make "x" of item i: what a value is tells of which item it is, and where in it. Narrowed to two bytes of four."""

    def __init__(self, size: int = 5000) -> None:
        self.size = size

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "x": ramp(item["i"], self.size)}


def ramp(i: int, size: int = 5000) -> torch.Tensor:
    return (torch.arange(size) * 7 + i * 1009).remainder(60_013).float()


def loader(ds: Any, method: str = "fork", workers: int = 2, **kwargs: Any) -> DataLoader:
    return DataLoader(
        ds,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=workers,
        multiprocessing_context=context(method),
        timeout=60,
        **kwargs,
    )


def check(items: Any, ds: Any, size: int = 5000) -> None:
    items = list(items)
    assert [item["i"] for item in items] == [item["i"] for item in ds.data]
    for item in items:
        assert torch.equal(item["x"], ramp(item["i"], size))


def exit_status(function: Any, *args: Any, method: str = "fork") -> int | None:
    process = context(method).Process(target=function, args=args)
    process.start()
    process.join(100)
    process.kill()  # if it hangs
    process.join()
    return process.exitcode


def open_below(base: Path) -> list[str]:
    """Return what this process has open or mapped below a directory."""
    links = [p.readlink() for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    return [str(p) for p in (*links, Path("/proc/self/maps").read_text()) if str(base) in str(p)]


def left(base: Path) -> list[Path]:
    return list(base.iterdir())


def files(base: Path) -> list[Path]:
    return [p for p in base.glob("zcache-*/*") if p.name not in ("ledger", "in-use")]


# --- workers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "workers", "persistent"),
    [*((m, 2, p) for m in ("fork", "forkserver") for p in (False, True)), ("spawn", 1, True)],
)
def test_memory_outlives_the_workers_and_goes_with_the_data_set(method, workers, persistent, base, tmp_path):
    log = str(tmp_path / "log")
    ds = CacheDataset(DATA, [Counted("i", log), Ramp()], memory="8MiB", memory_dir=base)
    check([ds[0]], CacheDataset(DATA[:1], Ramp(), memory="8MiB", memory_dir=base))  # the parent has used it by now
    batches = loader(ds, method, workers, persistent_workers=persistent)
    for _ in range(3):
        check(batches, ds)
        until(lambda: len(files(base)) == len(DATA))
    del batches
    assert runs(log) == len(DATA)
    assert ds.stats.misses == len(DATA)
    assert ds.stats.memory_hits >= 2 * len(DATA)
    assert (ds.stats.damaged, ds.stats.read_errors, ds.stats.memory_refused) == (0, 0, 0)
    ds.close()
    gc.collect()
    until(lambda: not left(base))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_that_outlive_their_data_set_remove_the_memory(method, base):
    ds = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
    batches = loader(ds, method, persistent_workers=True)
    check(batches, ds)
    ds.close()
    assert len(left(base)) == 1
    check(batches, ds)
    del batches
    until(lambda: not left(base))


def test_a_worker_that_is_killed_stops_nobody_else(base):
    """In a process of its own: PyTorch raises its error wherever the program is when the signal comes."""
    assert exit_status(_kill_a_worker, base, method="forkserver") == 0
    assert left(base) == []


def _kill_a_worker(base):
    ds = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
    check(loader(ds), ds)
    steps = iter(loader(ds, persistent_workers=True))
    with contextlib.suppress(RuntimeError, EOFError, OSError):
        next(steps)
        os.kill(steps._workers[0].pid, signal.SIGKILL)
        list(steps)
        os._exit(9)  # it would be news if PyTorch went on
    del steps
    misses = ds.stats.misses
    check(loader(ds), ds)
    assert ds.stats.misses == misses
    ds.close()


def test_workers_start_while_writers_of_the_parent_fill_memory(base, tmp_path):
    """A fork at any moment of another thread's write leaves no lock behind, whoever holds it."""
    ds = PersistentDataset(
        [{"i": i} for i in range(120)], Ramp(20_000), tmp_path / "disk", memory="64MiB", memory_dir=base
    )
    ends = []
    for i in range(len(ds)):
        ds[i]
        if i % 12 == 0:
            child = context("fork").Process(target=_one, args=(ds, i))
            child.start()
            ends.append(child)
    ds.flush()
    for child in ends:
        child.join(60)
    assert [child.exitcode for child in ends] == [0] * 10
    check(ds, ds, 20_000)
    assert ds.stats.memory_refused == 0
    ds.close()
    assert left(base) == []


def _one(ds, i):
    torch.set_num_threads(1)  # GNU OpenMP hangs in a child that was forked after it had been used
    check([ds[i]], CacheDataset([{"i": i}], None, memory="1MiB", memory_dir=ds._cache._memory.directory), 20_000)
    ds.flush()


# --- several data sets ---------------------------------------------------------------------------------------------


def test_two_data_sets_share_the_items_that_they_have_in_common(base, tmp_path):
    log = str(tmp_path / "log")
    steps = [Counted("i", log), Ramp()]
    with CacheDataset(DATA, steps, memory="8MiB", memory_dir=base) as a:
        check(a, a)
        a.flush()
        with CacheDataset([*DATA[4:], {"i": 99}], steps, memory="8MiB", memory_dir=base) as b:
            check(b, b)
            b.flush()
            assert (b.stats.misses, b.stats.memory_hits) == (1, 8)
            assert runs(log) == len(DATA) + 1
        check(a, a)  # b has left, a has not
        assert a.stats.misses == len(DATA)
    assert left(base) == []


def test_the_smaller_budget_of_two_data_sets_refuses_what_the_larger_takes(base, heard):
    with (
        CacheDataset(DATA, Ramp(), memory="1MiB", memory_dir=base) as large,
        CacheDataset([{"i": 100 + i} for i in range(9)], Ramp(), memory="64KiB", memory_dir=base) as small,
    ):
        check(small, small)  # 12 KiB each
        small.flush()
        check(large, large)
        large.flush()
        check(small, small)
        check(large, large)
        assert (small.stats.memory_filled, large.stats.memory_filled) == (5, 12)
        assert (small.stats.memory_hits, large.stats.memory_hits) == (5, 12)
        assert large._cache._ram._directory.used_bytes() == 17 * 12 * 1024
    assert {str(w.message).split(":")[0] for w in heard} == {"the memory for cached items is full (65536 bytes)"} or (
        len(heard) == 1 and "memory=" in str(heard[0].message)
    )
    assert left(base) == []


def test_data_sets_that_are_garbage_release_their_part(base, monkeypatch):
    monkeypatch.setattr(zcache.storage.pool, "_IDLE_S", 0.05)
    for _ in range(5):
        ds = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
        check(ds, ds)
        ds.flush()
        check(ds, ds)
        del ds

    def gone():
        gc.collect()
        return not left(base) and not open_below(base)

    until(gone)


def test_many_data_sets_leave_file_descriptors_to_others(base):
    """Before Python 3.13 each file that stays mapped takes one."""
    assert exit_status(_many_data_sets, base) == 0
    assert left(base) == []


def _many_data_sets(base):
    data = [{"i": i} for i in range(80)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    sets = [CacheDataset(data, Ramp(), memory="64MiB", memory_dir=base) for _ in range(10)]
    for _ in range(2):
        for ds in sets:
            check(ds, ds)
            ds.flush()
    assert [ds.stats.memory_hits >= 80 for ds in sets] == [True] * 10
    with contextlib.ExitStack() as opened:
        for _ in range(40):
            opened.enter_context(Path(__file__).open())
    for ds in sets:
        ds.close()


def test_a_data_set_can_be_copied_and_pickled(base):
    ds = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
    expected = ds[0]
    ds.flush()
    for other in (copy.deepcopy(ds), copy.copy(ds), pickle.loads(pickle.dumps(ds))):
        assert_same(expected, other[0])
        assert other.stats.misses <= 1
        other.close()
    check(ds, ds)
    ds.close()
    assert left(base) == []


# --- few file descriptors, little memory -----------------------------------------------------------------------------


def test_case_20_a_limit_of_256_open_files_and_thousands_of_items(base):
    assert exit_status(_few_descriptors, base) == 0
    assert left(base) == []


def _few_descriptors(base):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    warnings.simplefilter("error", ZCacheWarning)
    torch.multiprocessing.set_sharing_strategy("file_system")  # a descriptor for each tensor, else
    data = [{"i": i} for i in range(1500)]
    with CacheDataset(data, Ramp(1500), memory="64MiB", memory_dir=base) as ds:
        for _ in range(2):
            check(loader(ds, prefetch_factor=20), ds, 1500)
        check(ds, ds, 1500)
        assert (ds.stats.misses, ds.stats.memory_hits) == (1500, 3000)


SMALL = """
import sys
import numpy as np
from torch.utils.data import DataLoader, Dataset
from zcache import Cache

class Items(Dataset):
    def __init__(self, cache):
        self.cache = cache
    def __len__(self):
        return 24
    def __getitem__(self, i):
        found = self.cache.get(f"{i:032x}", None)
        if found is None:
            found = self.cache.put(f"{i:032x}", {"x": np.random.default_rng(i).random(400_000)})
        return found["x"]

disk, expected = sys.argv[1], [np.random.default_rng(i).random() for i in range(24)]
with Cache(disk, memory="8GiB") as cache:
    for epoch in range(3):
        batches = DataLoader(Items(cache), batch_size=1, num_workers=2, multiprocessing_context="fork", timeout=60)
        assert [float(batch[0, 0]) for batch in batches] == expected
    stats = cache.stats
assert stats.misses == 24 and stats.hits + stats.memory_hits == 48, stats
assert 0 < stats.memory_filled < 11 and stats.memory_hits > 0, stats  # 3.2 MB each, half of 64 MiB are spared
assert sum(stats.skipped.values()) == 0, stats
"""


def test_case_20_a_container_of_64_mb_shared_memory_degrades_to_disk_with_one_warning(tmp_path):
    """In a mount namespace of its own, /dev/shm is what containers get; PyTorch's workers send batches through it."""
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    if (
        os.geteuid()
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("only root can mount")
    job = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && "$@" && ls -A /dev/shm',
            "sh",
            sys.executable,
            "-c",
            SMALL,
            tmp_path,
        ],
        env={k: v for k, v in os.environ.items() if k != "ZCACHE_MEMORY_DIR"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("ZCacheWarning") == 1, job.stderr
    assert "--shm-size" in job.stderr
    assert "bus error" not in job.stderr.lower()
    assert job.stdout == ""


# --- one copy ------------------------------------------------------------------------------------------------------


def pss(pids: list[int], below: str = "") -> int:
    """Return the sum of the proportional set sizes of what processes have mapped from a directory, or of all."""
    total, inside = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024 * inside
            elif not line.split(None, 1)[0].endswith(":"):  # the head of a mapping
                inside = below in line
    return total


def _rank(base, pipe):
    torch.set_num_threads(1)  # GNU OpenMP hangs in a child that was forked after it had been used
    ds = CacheDataset([{"i": i} for i in range(16)], Ramp(300_000), memory="64MiB", memory_dir=base)
    batches = loader(ds, persistent_workers=True)
    while pipe.recv():
        check(batches, ds, 300_000)
        pipe.send((os.getpid(), [worker.pid for worker in batches._iterator._workers]))
    del batches
    ds.close()


def test_case_24_ranks_and_workers_hold_one_copy_over_five_epochs(base):
    """The sum of their shares of it is one narrow copy, and what they take besides does not grow by another."""
    ranks = []
    for _ in range(2):
        own, other = context("fork").Pipe()
        process = context("fork").Process(target=_rank, args=(base, other))
        process.start()
        ranks.append((process, own))
    mapped, total = [], []
    for epoch in range(6):
        for _, pipe in ranks:
            pipe.send(True)
        answers = [pipe.recv() for _, pipe in ranks]
        if epoch == 0:
            until(lambda: len(files(base)) == 16)
            copy_nbytes = sum(f.stat().st_size for f in files(base))
            assert 16 * 600_000 < copy_nbytes < 16 * 610_000
            continue
        workers = [pid for _, pids in answers for pid in pids]
        assert len(workers) == 4
        mapped.append(pss([*workers, *(pid for pid, _ in answers)], str(base)))
        total.append(pss(workers))
    for process, pipe in ranks:
        pipe.send(False)
        process.join(60)
        assert process.exitcode == 0
    assert min(mapped) > 0.9 * copy_nbytes, mapped
    assert max(mapped) < 1.1 * copy_nbytes, mapped
    assert max(total) - total[0] < copy_nbytes, total
    assert left(base) == []


# --- ends ----------------------------------------------------------------------------------------------------------


def _parent(base, how, pipe):
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1  # how soon workers notice that it is gone
    train = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
    validation = CacheDataset(DATA[:3], Ramp(), memory="8MiB", memory_dir=base)
    check(validation, validation)
    validation.flush()
    batches = iter(loader(train, persistent_workers=True))
    next(batches)
    _kept.extend([train, validation, batches])
    pipe.send([worker.pid for worker in batches._workers])
    if how in ("kill", "term"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pause()
    if how == "raise":
        raise SystemExit(7)


_kept: list[Any] = []


@pytest.mark.parametrize(("how", "status"), [("kill", -9), ("term", -15), ("raise", 7), ("return", 0)])
def test_case_21_whatever_ends_a_process_nothing_is_left_when_its_workers_are_gone(how, status, base):
    own, other = context("forkserver").Pipe()
    process = context("forkserver").Process(target=_parent, args=(base, how, other))
    process.start()
    workers = own.recv()
    assert len(left(base)) == 1
    if how in ("kill", "term"):
        os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)
    process.join(60)
    assert process.exitcode == status
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and _runs(pid) for pid in workers))
    until(lambda: not left(base))


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    return False


EXITS = """
import sys
import numpy as np
from torch.utils.data import DataLoader
from zcache import Cache

class Items:
    def __init__(self, cache):
        self.cache = cache
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return self.cache.put(f"{i:032x}", {"x": np.full(300_000, i)})["x"]

cache = Cache(sys.argv[1], memory="64MiB", memory_dir=sys.argv[2])
loader = DataLoader(Items(cache), batch_size=None, num_workers=2, persistent_workers=True, prefetch_factor=1)
batches = iter(loader)
next(batches)
for i in range(6, 9):
    Items(cache)[i]  # to be written when it ends
if sys.argv[3] == "raise":
    1 / 0
"""


@pytest.mark.parametrize("how", ["return", "raise"])
def test_the_end_of_the_interpreter_writes_what_is_pending_and_leaves_no_memory(how, base, tmp_path):
    """Workers that still wait for work are terminated on the way, and take part in the memory until then."""
    disk = tmp_path / "disk"
    job = subprocess.run([sys.executable, "-c", EXITS, disk, base, how], cwd=ROOT, capture_output=True, check=False)
    assert job.returncode == (how == "raise"), job.stderr
    assert left(base) == []
    with Cache(disk, read_only=True) as cache:
        assert {f"{i:032x}" for i in range(6, 9)} <= set(cache.keys())
        for i in range(6, 9):
            np.testing.assert_array_equal(cache.get(f"{i:032x}")["x"], np.full(300_000, i))


RANK = """
import os, signal, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader
from zcache import Cache

rank, base, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

class Items:
    def __init__(self, cache):
        self.cache = cache
    def __len__(self):
        return 40
    def __getitem__(self, i):
        found = self.cache.get(f"{i:032x}", None)
        return (self.cache.put(f"{i:032x}", {"x": np.arange(5000) * 3 + i}) if found is None else found)["x"]

cache = Cache(None, memory="64MiB", memory_dir=base)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
dist.barrier()
epoch = 0
while not (folder / "end").exists():
    loader = DataLoader(Items(cache), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for i, x in enumerate(loader):
        assert (x == np.arange(5000) * 3 + i).all()
        if rank == 1 and epoch == 1 and i == 20:
            os.kill(os.getpid(), signal.SIGKILL)
    if epoch == 1:
        (folder / f"rank{rank}").touch()
    epoch += 1
cache.close()
assert cache.stats.memory_hits >= 40 * (epoch - 1), cache.stats
(folder / "done").touch()
"""


def test_case_21_ranks_of_torchrun_share_memory_and_the_survivors_go_on_when_one_is_killed(base, tmp_path):
    """Two that were started independently, each with two workers; there is no manager, and nothing is handed over."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        jobs = [
            subprocess.Popen(
                [*command, str(rank), str(base), str(tmp_path)], env=environment, stdout=log, stderr=log, cwd=tmp_path
            )
            for rank in range(2)
        ]
        try:
            assert jobs[1].wait(90) == 1  # torchrun has ended what is left of the rank that was killed
            assert jobs[0].poll() is None
            assert len(left(base)) == 1
            (tmp_path / "end").touch()
            assert jobs[0].wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    assert (tmp_path / "done").exists()
    assert not (tmp_path / "rank1").exists()
    until(lambda: not left(base))  # workers notice after five seconds that their rank was killed


def test_the_next_run_reclaims_what_all_killed_processes_left(base):
    pid = fork()
    if pid == 0:
        ds = CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base)
        check(ds, ds)
        ds.flush()
        ds._cache._ram._directory.create("f" * 32, 5 * 4096)[0].write(0, b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert len(files(base)) == len(DATA) + 1
    with CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base) as ds:
        assert len(files(base)) == len(DATA)
        assert ds._cache._ram._directory.used_bytes() == len(DATA) * 3 * 4096
        check(ds, ds)
        assert ds.stats.misses == 0
    assert left(base) == []


# --- places --------------------------------------------------------------------------------------------------------


def test_a_place_where_nothing_may_be_written_turns_memory_off_with_one_warning(base, tmp_path, heard):
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        read_only = 4096 | 1 | 32  # MS_BIND | MS_RDONLY | MS_REMOUNT
        pid = fork()
        if pid == 0:
            paths = [os.fsencode(base)] * 2
            mounted = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
            mounted = mounted and libc.mount(*paths, None, 4096, None) == 0
            mounted = mounted and libc.mount(*paths, None, read_only, None) == 0
            if not mounted:
                os._exit(4)
            try:
                _without_memory(base, tmp_path, heard)
            except BaseException:  # noqa: BLE001 - the child is a copy of pytest
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 4:
            pytest.skip("only root can mount")
        assert status == 0
        return
    base.chmod(0o500)
    _without_memory(base, tmp_path, heard)


def _without_memory(base, tmp_path, heard):
    with PersistentDataset(DATA, Ramp(), tmp_path / "disk", memory="8MiB", memory_dir=base) as ds:
        check(ds, ds)
        ds.flush()
        check(loader(ds), ds)
        assert (ds.stats.hits, ds.stats.stored) == (12, 12)
    assert [w.category for w in heard] == [ZCacheWarning]
    assert "nothing is cached in memory" in str(heard[0].message)


def test_a_link_in_place_of_memory_dir_is_followed(base, tmp_path):
    (tmp_path / "link").symlink_to("shm")
    with (
        CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=tmp_path / "link") as a,
        CacheDataset(DATA, Ramp(), memory="8MiB", memory_dir=base) as b,
    ):
        check(a, a)
        a.flush()
        check(b, b)
        assert b.stats.misses == 0
    assert left(base) == []


def test_memory_that_vanishes_under_a_training_is_done_without(base, tmp_path, heard):
    """As when an administrator clears /dev/shm up."""
    with PersistentDataset(DATA, Ramp(), tmp_path / "disk", memory="8MiB", memory_dir=base) as ds:
        check(ds, ds)
        ds.flush()
        check(ds, ds)
        subprocess.run(["rm", "-r", *left(base)], check=True)
        check(ds, ds)
        check(loader(ds), ds)
        check(ds, ds)
        assert ds.stats.misses == len(DATA)
        assert ds.stats.damaged == 0
    assert len([w for w in heard if w.category is ZCacheWarning]) == 1
    assert left(base) == []
