"""Directories of a store: where entries lie, how one is built aside and published by one rename.

Durability contract: an entry is absent or whole. It is built in ``staging/`` on the same file system and gets its
final name by one ``rename(2)``; nothing is ever changed in place. After a power failure an entry that was published
shortly before may be missing, or lack bytes that never reached the disk: its checksums tell, and it counts as absent.
On request its files are on the disk before it gets its name, and the name before `publish` returns. Correctness needs
exclusive ``mkdir`` and ``rename`` only: no locks, no links, no ``O_APPEND``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zcache.encoding.array_layout import array_parts, shard_path
from zcache.encoding.layout import DOCUMENT, MAX_DOCUMENT_BYTES, root_document
from zcache.encoding.names import is_array_name
from zcache.errors import CacheConfigError, EntryDamagedError
from zcache.storage import files

__all__ = ["Store", "sweep_staging"]

_KEY = re.compile(r"[0-9a-f]{32}")
_OWNER = "owner.json"
_MAX_OWNER_BYTES = 4096
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
            # Asked again: it may be made, or be denied by a file system that falters, between two questions.
            known = files.is_directory(self.cache_dir) or not files.exists(self.cache_dir)
            if not known and not files.is_directory(self.cache_dir):
                raise CacheConfigError(f"cache_dir must be a directory, but {self.cache_dir} is a file")
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._staging: Path | None = None
        self._made: list[Path] = []  # more than one if a file system once denied that it is there
        self._staged = 0
        self._in_use = 0
        self._pid = os.getpid()  # last: another thread of a forked child takes the rest for its own from here on

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

    @staticmethod
    def is_key(name: str) -> bool:
        """Whether an entry could bear this name: 32 lower-case hexadecimal digits."""
        return _KEY.fullmatch(name) is not None

    def keys(self) -> Iterator[str]:
        """Yield the keys of the published entries, in no particular order."""
        with contextlib.suppress(FileNotFoundError):
            yield from (name for name, _ in files.list_directory(self.root) if _KEY.fullmatch(name))

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
        EntryDamagedError
            It is no regular file, or far too large.
        OSError
            It cannot be read.
        """
        return files.read_below(self.root, [*self._parts(key, child), DOCUMENT], MAX_DOCUMENT_BYTES)

    def open_shard(self, key: str, name: str, ndim: int, child: str = "", *, is_label: bool = False) -> int:
        """Open the shard of an array of an entry, or of a group that was added to it; return the file descriptor.

        Raises
        ------
        FileNotFoundError
            There is no such shard.
        EntryDamagedError
            It is no regular file.
        OSError
            It cannot be opened.
        """
        if not is_array_name(name):
            raise ValueError(f"{name!r} is not the name of an array")
        inside = array_parts(name, is_label=is_label)
        return files.open_below(self.root, [*self._parts(key, child), *inside, *shard_path(ndim).split("/")])

    def _parts(self, key: str, child: str) -> list[str]:
        if not self.is_key(key) or (child and not is_array_name(child)):
            self.group_path(key, child)  # says what is wrong
        return [key, child] if child else [key]

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
            files.remove_tree(path)
            with self._lock:
                self._in_use -= 1

    def publish(self, staged: Path, key: str, *, replace: bool = False, durable: bool = False) -> bool:
        """Give a finished directory its final name.

        Parameters
        ----------
        staged : path
            From `staged`, complete.
        key : str
            Name of the entry.
        replace : bool
            Put it in the place of an entry that is there. Otherwise the first one stays.
        durable : bool
            Have the name on the disk before this returns.

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
        published = self._rename(staged, final)
        if not published and (replace or not self._is_entry(final)):
            self._discard(final)
            published = self._rename(staged, final)  # if another process was faster, its entry is as new as this one
        if published and durable:
            files.sync_directory(self.root)
        return published

    @staticmethod
    def _is_entry(final: Path) -> bool:
        """Whether what bears the name of an entry has a document; without one, it is none to any reader."""
        try:
            return not files.is_link(final) and any(name == DOCUMENT for name, _ in files.list_directory(final))
        except NotADirectoryError:
            return False
        except FileNotFoundError:  # a client of NFS may not see yet what rename(2), which asked the server, met
            return True

    def publish_child(self, staged: Path, key: str, child: str, *, durable: bool = False) -> bool:
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
            published = self._rename(staged, self.group_path(key, child))
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ESTALE):  # the entry has been removed or replaced
                raise
            return False
        if published and durable:
            files.sync_directory(self.entry_path(key))
        return published

    @staticmethod
    def _rename(staged: Path, final: Path) -> bool:
        try:
            files.rename(staged, final)
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
            if not self._in_use:
                for path in self._made:
                    files.remove_tree(path)
                self._made = []
                self._staging = None

    def remove(self, key: str, child: str = "") -> None:
        """Take an entry, or a group that was added to it, out of sight in one step, then remove it.

        Whoever has it open can read on. Nothing happens if it is gone already.

        Raises
        ------
        OSError
            The file system refuses: no permission, or read-only.
        """
        self._discard(self.group_path(key, child))

    def _discard(self, final: Path) -> None:
        """Take a published entry out of sight in one step, then remove it."""
        away = self._new_staged()
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            files.rename(final, away / "old")
        files.remove_tree(away)

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # before the lock is touched: a thread of the parent may have held it
            self._reset()

    def _new_staged(self, in_use: int = 0) -> Path:
        self._notice_fork()
        with self._lock:
            if self._staging is None or not files.is_directory(self._staging):
                self._staging = self._make_staging()
                self._made.append(self._staging)
            self._staged += 1
            path = self._staging / str(self._staged)
            files.make_directory(path)
            self._in_use += in_use
            return path

    def _make_staging(self) -> Path:
        files.make_directory(self.root, parents=True)
        parent = self.cache_dir / "staging"
        files.make_directory(parent, parents=True)
        sweep_staging(parent)
        path = parent / uuid.uuid4().hex
        try:
            files.make_directory(path)
            files.write_file(path / _OWNER, json.dumps(_this_process()).encode("ascii"))
            document = self.root / DOCUMENT
            if not files.exists(document):
                draft = path / DOCUMENT
                files.write_file(draft, root_document())
                files.rename(draft, document)  # every process writes the same bytes
        except BaseException:
            files.remove_tree(path)  # without an owner it would lie there for a day
            raise
        return path


def sweep_staging(parent: Path) -> int:
    """Remove the staging directories of processes that are gone.

    A directory of this host goes as soon as its process is dead (process id and start time are compared); one of
    another host, or without an owner, once it has not been touched for a day. What does not bear a name that this
    module gives is not its own and stays; so does everything if `parent` is a link.

    Returns
    -------
    int
        Number of directories removed.
    """
    removed = 0
    try:
        if files.is_link(parent):
            return 0
        candidates = [name for name, is_dir in files.list_directory(parent) if is_dir and _KEY.fullmatch(name)]
    except OSError:
        return 0
    for name in candidates:
        try:
            stale = _is_stale(parent, name)
        except OSError:  # vanished or unreadable: not ours to judge
            continue
        if stale:
            files.remove_tree(parent / name)
            removed += 1
    return removed


def _is_stale(parent: Path, name: str) -> bool:
    try:
        owner = json.loads(files.read_below(parent, [name, _OWNER], _MAX_OWNER_BYTES).decode("ascii"))
        host, pid, started = str(owner["host"]), int(owner["pid"]), owner["started"]
    except (FileNotFoundError, EntryDamagedError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        host, pid, started = "", 0, None
    if host == _host():
        return not _is_alive(pid, started)
    return time.time() - files.modified_s(parent / name) > _FOREIGN_STALE_S


def _this_process() -> dict[str, Any]:
    return {"host": _host(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _host() -> str:
    """Name a range of process ids: host, boot and pid namespace, since containers share the first two."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        # Bytes: to open a text file imports its codec, and a child that is forked meanwhile never gets to have it.
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_bytes().decode("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    return " ".join(parts)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on, or None where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes().decode("ascii", "replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the second one, the name, may hold anything


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None where /proc does not tell."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _is_alive(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    fields = _stat(pid)
    if fields is None:
        return True
    # Dead, but nobody asked how it ended: so it stays where the first process of a container does not wait for orphans.
    is_zombie = fields[0] == "Z" and fields[17] == "1"
    return not is_zombie and started in (None, fields[19])
