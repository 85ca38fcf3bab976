"""What several test modules need: items written whatever their size, other processes, broken disks, blocked writers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

import zcache.storage.recorder
from zcache.encoding.array_layout import ArrayRecord, shard_path
from zcache.encoding.layout import EntryRecord, parse_entry
from zcache.encoding.payload import ArrayLeaf, EncodedItem
from zcache.storage import files
from zcache.storage.reader import Shard
from zcache.storage.store import Store
from zcache.storage.writer import WriteSettings, Written, write_entry

REPOSITORY = Path(__file__).parents[1]
_STUCK_S = 60


def key(i: int) -> str:
    return f"{i:032x}"


def ct_like(shape: tuple[int, ...] = (1, 40, 44, 48), seed: int = 0) -> np.ndarray:
    """int16 noise around a few levels: nothing that compresses to nothing."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 3, shape) * 300 + rng.normal(0, 20, shape)).astype(np.int16)


def leaves_of(arrays: Mapping[str, np.ndarray]) -> EncodedItem:
    """An item of arrays that are stored as Zarr arrays however small they are."""
    return EncodedItem(sorted(arrays), tuple(ArrayLeaf(name, array) for name, array in arrays.items()))


def write(
    store: Store, name: str, arrays: Mapping[str, np.ndarray], how: WriteSettings | None = None, **kwargs
) -> Written:
    return write_entry(store, name, leaves_of(arrays), how or WriteSettings(), {}, **kwargs)


def record_of(store: Store, name: str) -> EntryRecord:
    return parse_entry(store.read_document(name))


def read(store: Store, name: str, array: str, region=None) -> np.ndarray:
    record = record_of(store, name).arrays[array]
    return read_array(shard_file(store, name, array, len(record.grid.shape)), record, region)


def shard_file(store: Store, name: str, array: str, ndim: int) -> Path:
    return store.entry_path(name) / array / shard_path(ndim)


def read_array(path: Path, record: ArrayRecord, region=None) -> np.ndarray:
    """Open one array, read a region of it, close it."""
    shard = Shard(os.open(path, os.O_RDONLY), record)
    try:
        return shard.read(region)
    finally:
        shard.close()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def files_under(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder with its time of change and its bytes."""
    paths = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


def staging_left(cache_dir: Path) -> list[Path]:
    parent = cache_dir / "staging"
    return sorted(parent.rglob("*")) if parent.is_dir() else []


def in_fork(body: Callable[[], object]) -> None:
    """Run a function in a forked child; a failed assertion there, or a deadlock, fails the test here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: fork with threads is what is tested
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_STUCK_S)
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - reported through the exit status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with wait status {status}"


def run_script(code: str, *args: object, folder: Path, wrap: tuple[str, ...] = (), **env: str) -> str:
    """Run a script in a fresh interpreter where warnings are errors; return what it printed."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [*wrap, sys.executable, "-W", "error", str(script), *map(str, args)]
    paths = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_STUCK_S, env={**os.environ, **paths, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


class Gate:
    """Holds back every write of an entry until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.writes = 0

    def write_entry(self, *args, **kwargs) -> Written:
        self.writes += 1
        self.reached.set()
        assert self.open.wait(_STUCK_S)
        return write_entry(*args, **kwargs)


@contextlib.contextmanager
def gated(monkeypatch) -> Iterator[Gate]:
    gate = Gate()
    with monkeypatch.context() as m:
        m.setattr(zcache.storage.recorder, "write_entry", gate.write_entry)
        try:
            yield gate
        finally:
            gate.open.set()


class SystemCalls:
    """The system calls of a store, one by one: counted, and each may be meddled with.

    Parameters
    ----------
    meddle : callable
        ``meddle(n, name, real, args, kwargs)`` stands in for the n-th call.
    """

    NAMES = frozenset(
        ("open", "close", "pread", "write", "fsync", "fstat", "stat", "lstat", "mkdir", "rename", "scandir")
    )

    def __init__(self, monkeypatch, meddle) -> None:
        self.calls: list[str] = []
        self._meddle = meddle
        self._lock = threading.Lock()
        monkeypatch.setattr(files, "os", self)

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self.NAMES:
            return real

        def call(*args, **kwargs):
            with self._lock:
                self.calls.append(name)
                n = len(self.calls)
            return self._meddle(n, name, real, args, kwargs)

        return call


class BrokenDisk:
    """Refuses the n-th change of the file system, or all from the n-th on: mkdir, open, write, close and rename."""

    def __init__(self, monkeypatch, error: int, n: int, *, lasting: bool = False) -> None:
        self.calls = 0
        self.broken = False
        self._error, self._n, self._lasting = error, n, lasting
        self._lock = threading.Lock()
        self._written: set[int] = set()
        SystemCalls(monkeypatch, self._meddled)

    def _meddled(self, _n, name, real, args, kwargs):
        creates = name == "open" and args[1] & os.O_CREAT
        if name == "close" and args[0] in self._written:
            self._written.discard(args[0])
            real(*args)
            self._step()  # network file systems say only now that the disk is full
            return None
        if creates or name in ("mkdir", "rename", "write"):
            self._step()
        result = real(*args, **kwargs)
        if creates:
            self._written.add(result)
        return result

    def _step(self) -> None:
        with self._lock:
            self.calls += 1
            refuse = self.calls >= self._n if self._lasting else self.calls == self._n
        if refuse:
            self.broken = True
            raise OSError(self._error, os.strerror(self._error))
