"""Directories of a store: where entries lie, how one is built aside and published by one rename.

Durability contract: an entry is absent or whole. It is built in ``staging/`` on the same file system and gets its
final name by one ``rename(2)``; nothing is ever changed in place. Correctness needs exclusive ``mkdir`` and
``rename`` only: no locks, no links, no ``O_APPEND``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zcache.encoding.layout import DOCUMENT, root_document, shard_path
from zcache.encoding.names import is_array_name
from zcache.errors import CacheConfigError

__all__ = ["Store", "sweep_staging"]

_KEY = re.compile(r"[0-9a-f]{32}")
_OWNER = "owner.json"
_FOREIGN_STALE_S = 24 * 3600.0


class Store:
    """The files of one cache directory.

    May be pickled and used after a fork: what belongs to one process (its staging directory) is made anew in each.

    Parameters
    ----------
    cache_dir : path
        Holds ``cache.zarr/`` and ``staging/``; both are made when the first entry is written.

    Raises
    ------
    CacheConfigError
        `cache_dir` exists and is not a directory.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self.cache_dir = Path(cache_dir)
        with contextlib.suppress(OSError):  # out of reach: every read will be a miss, every write a counted failure
            if self.cache_dir.exists() and not self.cache_dir.is_dir():
                raise CacheConfigError(f"cache_dir must be a directory, but {self.cache_dir} is a file")
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._staging: Path | None = None
        self._staged = 0
        self._in_use = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"cache_dir": self.cache_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cache_dir = state["cache_dir"]
        self._reset()

    @property
    def root(self) -> Path:
        """The Zarr group that holds the entries."""
        return self.cache_dir / "cache.zarr"

    def entry_path(self, key: str) -> Path:
        """Directory of an entry.

        Raises
        ------
        ValueError
            `key` is not 32 lower-case hexadecimal digits.
        """
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"{key!r} is not a key: 32 lower-case hexadecimal digits")
        return self.root / key

    def keys(self) -> Iterator[str]:
        """Yield the keys of the published entries, in no particular order."""
        try:
            with os.scandir(self.root) as found:
                yield from (e.name for e in found if _KEY.fullmatch(e.name))
        except FileNotFoundError:
            return

    def group_path(self, key: str, child: str = "") -> Path:
        """Directory of an entry, or of a group that was added to it.

        Raises
        ------
        ValueError
            `key` is not a key, or `child` not the plain name of a group.
        """
        path = self.entry_path(key)
        if child and not is_array_name(child):
            raise ValueError(f"{child!r} is not the name of a group")
        return path / child

    def read_document(self, key: str, child: str = "") -> bytes:
        """Read the document of an entry, or of a group that was added to it.

        Raises
        ------
        FileNotFoundError
            There is no such entry or group.
        OSError
            It cannot be read.
        """
        with open(self.group_path(key, child) / DOCUMENT, "rb", buffering=0) as f:  # noqa: PTH123 - on the hot path
            return f.read()

    def shard(self, key: str, name: str, ndim: int, child: str = "") -> str:
        """Path of the shard of an array of an entry, or of a group that was added to it."""
        if not is_array_name(name):
            raise ValueError(f"{name!r} is not the name of an array")
        return f"{self.group_path(key, child)}/{name}/{shard_path(ndim)}"

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Give a fresh directory to build an entry in; whatever is left of it at the end is removed.

        Raises
        ------
        OSError
            It cannot be made: read-only or full file system, no permission.
        """
        path = self._new_staged(in_use=1)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            with self._lock:
                self._in_use -= 1

    def publish(self, staged: Path, key: str, *, replace: bool = False) -> bool:
        """Give a finished directory its final name.

        Parameters
        ----------
        staged : path
            From `staged`, complete.
        key : str
            Name of the entry.
        replace : bool
            Put it in the place of an entry that is there. Otherwise the first one stays.

        Returns
        -------
        bool
            False if another entry of that name was there first, or as soon, and stays.

        Raises
        ------
        OSError
            The rename is refused for another reason.
        """
        final = self.entry_path(key)
        if self._rename(staged, final):
            return True
        # What has no document is no entry, and no reader could tell that it is in the way.
        if not replace and (final / DOCUMENT).exists():
            return False
        self._discard(final)
        return self._rename(staged, final)  # if another process was faster, its entry is as new as this one

    def publish_child(self, staged: Path, key: str, child: str) -> bool:
        """Add a finished group to a published entry, of which nothing else changes; the first of a name stays.

        Returns
        -------
        bool
            False if the entry has such a group, or is gone.

        Raises
        ------
        OSError
            The rename is refused for another reason.
        """
        try:
            return self._rename(staged, self.group_path(key, child))
        except FileNotFoundError:
            return False

    @staticmethod
    def _rename(staged: Path, final: Path) -> bool:
        try:
            os.rename(staged, final)  # noqa: PTH104 - rename(2), by its name
        except OSError as e:
            # ENOTEMPTY on Linux and NFS, EEXIST on others; ENOTDIR: a foreign file bears the name.
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return False
        return True

    def close(self) -> None:
        """Remove this process's staging directory, unless another thread is building an entry in it."""
        self._notice_fork()
        with self._lock:
            if self._staging is not None and not self._in_use:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._staging = None

    def _discard(self, final: Path) -> None:
        """Take a published entry out of sight in one step, then remove it."""
        away = self._new_staged()
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(final, away / "old")  # noqa: PTH104
        shutil.rmtree(away, ignore_errors=True)

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # before the lock is touched: a thread of the parent may have held it
            self._reset()

    def _new_staged(self, in_use: int = 0) -> Path:
        self._notice_fork()
        with self._lock:
            if self._staging is None or not self._staging.is_dir():
                self._staging = self._make_staging()
            self._staged += 1
            path = self._staging / str(self._staged)
            path.mkdir()
            self._in_use += in_use
            return path

    def _make_staging(self) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        parent = self.cache_dir / "staging"
        parent.mkdir(exist_ok=True)
        sweep_staging(parent)
        path = parent / uuid.uuid4().hex
        path.mkdir()
        try:
            (path / _OWNER).write_text(json.dumps(_this_process()), "ascii")
            document = self.root / DOCUMENT
            if not document.exists():
                draft = path / DOCUMENT
                draft.write_bytes(root_document())
                draft.replace(document)  # every process writes the same bytes
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # without an owner it would lie there for a day
            raise
        return path


def sweep_staging(parent: Path) -> int:
    """Remove the staging directories of processes that are gone.

    A directory of this host goes as soon as its process is dead (process id and start time are compared); one of
    another host, or without an owner, once it has not been touched for a day.

    Returns
    -------
    int
        Number of directories removed.
    """
    removed = 0
    try:
        with os.scandir(parent) as found:
            candidates = [Path(e.path) for e in found if e.is_dir(follow_symlinks=False)]
    except OSError:
        return 0
    for path in candidates:
        try:
            stale = _is_stale(path)
        except OSError:  # vanished or unreadable: not ours to judge
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def _is_stale(path: Path) -> bool:
    try:
        owner = json.loads((path / _OWNER).read_text("ascii"))
        host, pid, started = str(owner["host"]), int(owner["pid"]), owner["started"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        host, pid, started = "", 0, None
    if host == _host():
        return not _is_alive(pid, started)
    return time.time() - path.stat().st_mtime > _FOREIGN_STALE_S


def _this_process() -> dict[str, Any]:
    return {"host": _host(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _host() -> str:
    """Name a range of process ids: host, boot and pid namespace, since containers share the first two."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]  # field 22, counted behind the name, which may hold anything


def _is_alive(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return started is None or _start_time(pid) in (started, None)
