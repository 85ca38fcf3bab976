"""Files in memory that all processes of a user on this node share, within a budget for all of them.

A file comes into being under a name of its own, is complete before it gets its final one, and never changes afterwards.
One that is given up loses its name, and its memory when the last process that has it mapped is done. Reading takes no
lock; whoever adds a file, or gives some up for it, holds one on the ledger, which says what all files take.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from zcache.errors import EntryDamagedError
from zcache.storage import files
from zcache.storage.ledger import locked_ledger, read_ledger
from zcache.storage.membership import OPEN_FLAGS, Membership, is_private, locked
from zcache.storage.room import Held, plan_room, spare_bytes

__all__ = ["Identity", "NewFile", "NoMemoryError", "SharedDirectory", "default_memory_dir"]

_NAME: Final = re.compile(r"[0-9a-f]{32}(\.[a-z]+-[0-9a-f]{16})?")
_PART: Final = re.compile(_NAME.pattern + r"\.[0-9a-f]{32}\.part")


class NoMemoryError(OSError):
    """A file cannot be written to memory."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells a file from another one that took its name.

    Attributes
    ----------
    inode, nbytes : int
        Of the file.
    """

    inode: int
    nbytes: int


def default_memory_dir() -> Path:
    """Return where files lie in memory.

    ``$ZCACHE_MEMORY_DIR``, else ``/dev/shm`` where there is one, else the directory for temporary files.
    """
    chosen = os.environ.get("ZCACHE_MEMORY_DIR")
    if chosen:
        return Path(chosen)
    shm = Path("/dev/shm")  # noqa: S108 - what lies in it is private, and checked
    return shm if shm.is_dir() and os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class SharedDirectory(Membership):
    """The shared files, as one process takes part in them.

    Parameters
    ----------
    base : path
        Directory to have them in, best one in memory.
    budget : callable
        ``budget(used_bytes)`` returns what all files may take together, given what they take now.
    keep : bool
        Leave them when this process is the last to leave.

    Raises
    ------
    CacheConfigError
        What is there in its place cannot be trusted.
    OSError
        It cannot be made.
    """

    def __init__(self, base: str | os.PathLike[str], budget: Callable[[int], int], *, keep: bool = False) -> None:
        super().__init__(base, keep=keep)
        self._oldest_ns = 0
        try:
            self.budget_bytes = budget(self.used_bytes())
        except BaseException:
            self.leave()
            raise

    def used_bytes(self) -> int:
        """Return what all files take, as far as it was written down."""
        return read_ledger(self.fd)[0]

    def n_evicted(self) -> int:
        """Return how many files were given up so far, by whatever process."""
        return read_ledger(self.fd)[1]

    def capacity_bytes(self) -> int:
        """Return what all files together could take at most, by the budget and by what the file system has left."""
        return max(0, min(self.budget_bytes, self.used_bytes() + self._free_bytes()))

    def names(self) -> list[str]:
        """Return the names of the files."""
        return [name for name in os.listdir(self.fd) if _NAME.fullmatch(name)]

    def identify(self, name: str) -> Identity | None:
        """Return what tells a file from others of its name, None if there is none."""
        try:
            found = os.stat(_checked(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return Identity(found.st_ino, found.st_size)

    def touch(self, name: str) -> None:
        """Note that a file was used."""
        now = time.time_ns()
        with contextlib.suppress(OSError):  # given up meanwhile
            os.utime(name, ns=(now, now), dir_fd=self.fd, follow_symlinks=False)

    def open(self, name: str, *, copy_on_write: bool = False) -> tuple[mmap.mmap, Identity] | None:
        """Map a file for reading; None if there is none.

        Parameters
        ----------
        name : str
            The file.
        copy_on_write : bool
            Let the mapping be written to, too, which nobody else sees.

        Raises
        ------
        EntryDamagedError
            It is nothing that this module made.
        OSError
            It cannot be opened.
        """
        try:
            fd = os.open(_checked(name), os.O_RDONLY | OPEN_FLAGS, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):
                raise EntryDamagedError(f"{self.path / name} is a link or a socket") from e
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not is_private(found) or not found.st_size:
                raise EntryDamagedError(f"{self.path / name} is not a private file of this user")
            access = mmap.ACCESS_COPY if copy_on_write else mmap.ACCESS_READ
            return mmap.mmap(fd, found.st_size, access=access, **_UNTRACKED), Identity(found.st_ino, found.st_size)
        finally:
            files.close(fd)

    def discard(self, name: str) -> None:
        """Remove a file, whatever it is."""
        with locked_ledger(self.fd) as ledger, contextlib.suppress(FileNotFoundError):
            nbytes = os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size
            self._unlink(name)
            ledger.write(max(0, ledger.total_bytes - _pages(nbytes)), ledger.n_evicted + 1)

    def create(self, name: str, nbytes: int) -> tuple[NewFile | None, int]:
        """Begin a file, making room for it.

        Parameters
        ----------
        name : str
            Its final name.
        nbytes : int
            Its size.

        Returns
        -------
        file : NewFile or None
            None if it does not fit now, or is there.
        n_evicted : int
            How many files had to go.

        Raises
        ------
        OSError
            The file system refuses, or the lock on the ledger is not to be had.
        """
        need, victims = _pages(nbytes), list[Held]()
        if need > self.budget_bytes:
            return None, 0
        with locked_ledger(self.fd) as ledger:
            total = ledger.total_bytes
            if self.identify(name) is not None:
                return None, 0
            if total + need > self._limit_bytes(total):
                unused_since_ns = max(self.began_ns, self._wanted_before_ns(name))
                if unused_since_ns <= self._oldest_ns:  # as when it was last looked at
                    return None, 0
                held = self._scan()
                total = sum(one.nbytes for one in held)
                ledger.write(total, ledger.n_evicted)
                found = plan_room(held, need, self._limit_bytes(total), unused_since_ns)
                if found is None:
                    self._oldest_ns = min((one.used_ns for one in held), default=0)
                    return None, 0
                victims = found
            for one in victims:
                self._unlink(one.name)
                total -= one.nbytes
            # Before it is there: whoever comes next knows of it.
            ledger.write(total + need, ledger.n_evicted + len(victims))
            try:
                return self._begin(name, nbytes), len(victims)
            except BaseException:
                ledger.write(total, ledger.n_evicted)
                raise

    def _mend(self) -> None:
        for name in os.listdir(self.fd):
            if _PART.fullmatch(name):
                self._unlink(name)
        with locked_ledger(self.fd) as ledger:
            ledger.write(sum(one.nbytes for one in self._scan()), ledger.n_evicted)

    def _limit_bytes(self, total: int) -> int:
        free = self._free_bytes()
        if free < self.budget_bytes:  # else whatever is still unwritten does not matter
            free -= self._unwritten_bytes()
        return min(self.budget_bytes, total + free)

    def _unwritten_bytes(self) -> int:
        """Return what files that are being written will still take of the file system."""
        left = 0
        for name in os.listdir(self.fd):
            if _PART.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                    left += max(0, _pages(found.st_size) - 512 * found.st_blocks)
        return left

    def _free_bytes(self) -> int:
        """Return what the file system has left for this directory; negative if others need it more."""
        found = os.fstatvfs(self.fd)
        if not found.f_blocks:  # without a limit
            return sys.maxsize // 2
        return found.f_bavail * found.f_frsize - spare_bytes(found.f_blocks * found.f_frsize)

    def _begin(self, name: str, nbytes: int) -> NewFile:
        part = f"{name}.{uuid.uuid4().hex}.part"
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600, dir_fd=self.fd)
        try:
            # Locked for as long as its writer lives; of its final size, so that it counts in full.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)
        except BaseException:
            files.close(fd)
            self._unlink(part)
            raise
        return NewFile(self, fd, part, name)

    def _scan(self) -> list[Held]:
        """Return the files that take memory, removing those that killed processes did not finish."""
        held: dict[int, Held] = {}
        for listed in os.listdir(self.fd):
            is_part = _PART.fullmatch(listed) is not None
            if is_part and self._is_abandoned(listed):
                self._unlink(listed)
            if not is_part and not _NAME.fullmatch(listed):
                continue
            # One that gets its final name meanwhile may have the one, the other or both: it counts once.
            for name in (listed, listed.rsplit(".", 2)[0]) if is_part else (listed,):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                    used_ns = found.st_mtime_ns if _NAME.fullmatch(name) else sys.maxsize
                    held[found.st_ino] = Held(name, _pages(found.st_size), used_ns)
        return list(held.values())

    def _is_abandoned(self, part: str) -> bool:
        try:
            fd = os.open(part, os.O_RDWR | OPEN_FLAGS, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        try:
            return locked(fd, fcntl.LOCK_EX)
        finally:
            files.close(fd)

    def _wanted_before_ns(self, name: str) -> int:
        """Note that a file was wanted that does not fit; return when it was, two times before, 0 if it was not.

        Between then and now lies a whole epoch: what was not read in all that time is not read any more, and may go.
        """
        note, now = f"{name}.want", time.time_ns()
        try:
            fd, is_new = os.open(note, os.O_RDONLY | OPEN_FLAGS, dir_fd=self.fd), False
        except FileNotFoundError:
            fd = os.open(note, os.O_RDONLY | os.O_CREAT | OPEN_FLAGS, 0o600, dir_fd=self.fd)
            is_new = True
        try:
            found = os.fstat(fd)
            os.utime(fd, ns=(0 if is_new else found.st_mtime_ns, now))
        finally:
            files.close(fd)
        return 0 if is_new else found.st_atime_ns

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


class NewFile:
    """A file that is being written; removed at the end of a ``with`` block, unless it was published."""

    def __init__(self, directory: SharedDirectory, fd: int, part: str, name: str) -> None:
        self._directory = directory
        self._fd = fd
        self._part = part
        self._name = name
        self._published = False

    def write(self, start: int, data: Any) -> None:
        """Write bytes, or a C-contiguous array, to a place.

        Raises
        ------
        NoMemoryError
            There is no memory left.
        """
        # Written and not mapped: where memory runs out, this is an error and no signal.
        with memoryview(data).cast("B") as left, _refusals():
            done = 0
            while done < len(left):
                written = os.pwrite(self._fd, left[done:], start + done)
                if not written:
                    raise OSError(errno.EIO, "a write of no bytes", self._part)
                done += written

    def publish(self) -> None:
        """Give the file its final name; nothing happens if another process was faster.

        Raises
        ------
        NoMemoryError
            The file system refuses.
        """
        fd, now = self._directory.fd, time.time_ns()
        # A link and no rename: that would take the place of another process's file, whose readers keep its memory.
        with _refusals(), contextlib.suppress(FileExistsError):
            os.utime(self._fd, ns=(now, now))
            os.link(self._part, self._name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
            self._published = True
        with contextlib.suppress(OSError):
            os.unlink(f"{self._name}.want", dir_fd=fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(OSError):
                if self._published:
                    os.unlink(self._part, dir_fd=self._directory.fd)
                else:
                    self._directory.discard(self._part)
        finally:
            files.close(self._fd)


_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # else it keeps a descriptor


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file in memory")
    return name


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise NoMemoryError(*e.args) from e


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
