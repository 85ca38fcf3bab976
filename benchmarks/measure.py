"""How the benchmark measures: time, bytes, a cold page cache and a bounded disk rate."""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PROCESS_IO = Path("/proc/self/io")
_BLKIO = Path("/sys/fs/cgroup/blkio")

#: What is read to use up the throttle's burst, and to check its rate: about the size of a cache entry.
_BURST = 32 << 20
_CHECK = 12 << 20

#: The rate of a mount on a fast network, in bytes per second.
NFS_RATE = 150_000_000


@dataclass(frozen=True)
class Sample:
    """What one action took.

    Attributes
    ----------
    wall
        Seconds that passed.
    cpu
        Seconds of processor time of this process, all its threads together.
    disk
        Bytes that the kernel fetched from the disk for this process.
    """

    wall: float
    cpu: float
    disk: int

    def __add__(self, other: Sample) -> Sample:
        return Sample(self.wall + other.wall, self.cpu + other.cpu, self.disk + other.disk)


def disk_read_bytes() -> int:
    """Return the bytes that this process has had read from disk so far; 0 where the kernel does not count them."""
    try:
        fields = dict(line.split(": ") for line in _PROCESS_IO.read_text().splitlines())
    except OSError:
        return 0
    return int(fields["read_bytes"])


def sample(action: Callable[[], object]) -> Sample:
    """Run ``action`` once and return what it took; its result is freed inside the measured time, as in a loop."""
    disk, cpu, wall = disk_read_bytes(), time.process_time(), time.perf_counter()
    action()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu, disk_read_bytes() - disk)


def median(values: Iterable[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def warm_memory(size: int) -> None:
    """Touch and free as much memory as what comes next needs.

    On a virtual machine whose host takes free memory back, memory that was free for a few seconds costs ten times as
    much to touch (180 ms against 10 ms for 80 MB), and dropping the page cache frees all of it. Without this, every
    figure would depend on what the peer before had freed.
    """
    np.ones(size, np.uint8)


def settle() -> None:
    """Bring the process and the disk to rest, so that one peer does not pay for the garbage of the one before."""
    gc.collect()
    os.sync()


def tree_bytes(directory: Path) -> int:
    """Return the summed sizes of all files below ``directory``."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def tree_files(directory: Path) -> int:
    """Return the number of files below ``directory``."""
    return sum(1 for path in directory.rglob("*") if path.is_file())


def can_drop_caches() -> bool:
    """Tell whether this process may drop the system's page cache."""
    return os.access(_DROP_CACHES, os.W_OK) and os.geteuid() == 0


def make_cold(directories: Iterable[Path], *, system_wide: bool) -> None:
    """Remove the files below ``directories`` from the page cache.

    Parameters
    ----------
    directories
        What must be cold afterwards.
    system_wide
        Drop the whole page cache with the cached directory entries (root only), so that metadata is cold too.
        Otherwise the kernel is asked to forget the pages of the named files.
    """
    os.sync()
    if system_wide:
        _DROP_CACHES.write_text("3")
        return
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _whole_disk(path: Path) -> str | None:
    """Return ``major:minor`` of the disk that holds ``path``: the throttle takes disks, not their partitions."""
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    try:
        node = node.resolve(strict=True)
        if (node / "partition").exists():
            node = node.parent
        return (node / "dev").read_text().strip()
    except OSError:  # tmpfs, overlay and network mounts have no block device
        return None


class ReadLimit:
    """Bound the rate at which this process reads from disk, by a temporary blkio cgroup (Linux, cgroup v1, root).

    Parameters
    ----------
    path
        A directory on the disk to throttle.
    rate
        Bytes per second.
    """

    def __init__(self, path: Path, rate: int = NFS_RATE) -> None:
        self._path = path
        self._rate = rate
        self._group = _BLKIO / f"zcache-benchmark-{os.getpid()}"
        self._home = _BLKIO
        self._ballast = path / "throttle-ballast.bin"

    @staticmethod
    def possible(path: Path) -> bool:
        """Tell whether the limit can be set up here at all; whether it holds, ``verify`` measures."""
        return (
            os.geteuid() == 0
            and can_drop_caches()
            and os.access(_BLKIO / "cgroup.procs", os.W_OK)
            and _whole_disk(path) is not None
        )

    def __enter__(self) -> Self:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if "blkio" in controllers.split(","):
                self._home = _BLKIO / group.lstrip("/")
        with self._ballast.open("wb") as file:
            for _ in range((_BURST + _CHECK) >> 20):
                file.write(os.urandom(1 << 20))
        make_cold([self._path], system_wide=True)
        self._group.mkdir()
        try:
            (self._group / "blkio.throttle.read_bps_device").write_text(f"{_whole_disk(self._path)} {self._rate}")
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._group.rmdir()
            self._ballast.unlink()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._home / "cgroup.procs").write_text(str(os.getpid()))
        self._group.rmdir()
        self._ballast.unlink()

    def saturate(self) -> None:
        """Use up the burst that the kernel grants after a pause, by reading a file of no interest.

        A throttle group that has rested may read about a tenth of a second's worth at full speed. A cache entry of few
        MB would fit into that and look as if there were no limit.
        """
        _read_cold(self._ballast, _BURST)

    def verify(self) -> float:
        """Return the rate, in bytes per second, at which a few MB are read under the limit: the median of three."""
        rates = []
        for _ in range(3):
            self.saturate()
            start = time.perf_counter()
            _read_cold(self._ballast, _CHECK, offset=_BURST)
            rates.append(_CHECK / (time.perf_counter() - start))
        return median(rates)


def _read_cold(path: Path, size: int, offset: int = 0) -> None:
    """Read a part of a file and leave nothing of it in the page cache."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing read ahead on somebody else's time
        for position in range(offset, offset + size, 1 << 20):
            os.pread(file.fileno(), 1 << 20, position)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
