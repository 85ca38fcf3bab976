"""Taking part in a directory that all processes of a user on this node share, for as long as one of them lives.

Whoever takes part holds a shared ``flock`` on one of its files, which the kernel lets go of when the process dies,
however it dies. The last to leave removes the directory; what killed processes left is cleared up by the next to join.
The directory is believed only if it belongs to this user and nobody else may enter it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import time
import uuid
import weakref
from hashlib import blake2b
from pathlib import Path
from typing import Final

from zcache.errors import CacheConfigError
from zcache.storage import files

__all__ = ["OPEN_FLAGS", "PATIENCE_S", "POLL_S", "Membership", "is_private", "locked"]

OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No file in the directory is opened without: neither a link nor a pipe leads astray."""

PATIENCE_S: Final = 5.0
"""Nobody holds a lock for longer than it takes to remove files."""

POLL_S: Final = 0.002

_USERS: Final = "in-use"
_GONE: Final = ".gone-"


class Membership:
    """One process's part in the shared directory.

    Parameters
    ----------
    base : path
        Directory to have it in.
    keep : bool
        Leave what is in it when this process is the last to leave.

    Raises
    ------
    CacheConfigError
        What is there in its place cannot be trusted.
    OSError
        It cannot be made.
    """

    def __init__(self, base: str | os.PathLike[str], *, keep: bool = False) -> None:
        self._base = Path(base)
        self.path = self._base / f"zcache-{os.geteuid()}-{_boot()}"
        self._keep = keep
        self._lock_fd = self.fd = -1
        _members.add(self)
        deadline = time.monotonic() + PATIENCE_S
        while not self._join():
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "other processes keep removing it", str(self.path))
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Let go of the directory; remove it if nobody else takes part, unless it is to be kept."""
        if self.fd < 0:
            return
        with contextlib.suppress(OSError):
            if not self._keep and locked(self._lock_fd, fcntl.LOCK_EX):
                self._remove()
        self.abandon()

    def abandon(self) -> None:
        """Close what is open, without a look at who else takes part."""
        fds, self._lock_fd, self.fd = (self._lock_fd, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                files.close(fd)

    def _mend(self) -> None:
        """Make good what killed processes left in the directory: nobody else takes part now."""

    def _clear_up(self) -> None:
        """Remove what killed processes left beside the directory."""
        prefix = f"zcache-{os.geteuid()}-"
        with contextlib.suppress(OSError), os.scandir(self._base) as found:
            for entry in found:
                if not entry.name.startswith(prefix) or entry.name == self.path.name:
                    continue
                if _GONE in entry.name or _is_deserted(entry.path):
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _join(self) -> bool:
        """Open the directory and lock it as one that is in use; False if another process removed it meanwhile."""
        joined = is_first = is_new = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
            is_new = True
        try:
            self.fd = _open_private(self.path)
            self._lock_fd = os.open(_USERS, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600, dir_fd=self.fd)
            is_first = locked(self._lock_fd, fcntl.LOCK_EX)
            if is_first:
                os.utime(self._lock_fd)
                self._mend()
            self.began_ns = os.fstat(self._lock_fd).st_mtime_ns
            joined = locked(self._lock_fd, fcntl.LOCK_SH) and self._is_mine()
        except FileNotFoundError:  # removed between two steps
            return False
        finally:
            if not joined:
                self.abandon()
                if is_new:  # of no use under this umask: not left for others to stumble over
                    with contextlib.suppress(OSError):
                        os.rmdir(self.path)
        if joined and is_first:  # others may join meanwhile: this can take as long as freeing all memory does
            self._clear_up()
        return joined

    def _is_mine(self) -> bool:
        """Whether the directory that is open is still the one of that name."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        own = os.fstat(self.fd)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _remove(self) -> None:
        away = self.path.with_name(f"{self.path.name}{_GONE}{uuid.uuid4().hex}")
        if self._is_mine():
            os.rename(self.path, away)
            shutil.rmtree(away, ignore_errors=True)


_members: weakref.WeakSet[Membership] = weakref.WeakSet()


def _abandon_all() -> None:
    """Let go, in a forked child, of what the parent takes part in: the child would hold its locks beyond its death."""
    for member in list(_members):
        member.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def locked(fd: int, how: int) -> bool:
    """Take a lock of `fcntl.flock` if it is free; whether it was."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_private(found: os.stat_result) -> bool:
    """Whether a file or directory belongs to this user and is closed to all others."""
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _open_private(path: Path) -> int:
    """Open a directory that nobody else can have put anything into."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise
        fd = -1
    trusted = False
    try:
        trusted = fd >= 0 and is_private(os.fstat(fd))
    finally:
        if not trusted and fd >= 0:
            files.close(fd)
    if not trusted:
        raise CacheConfigError(
            f"{path} is not a directory that only this user can enter: somebody else may have made it. Remove it, or "
            "name another place with memory_dir="
        )
    return fd


def _boot() -> str:
    """Name this start of this machine, whatever container the process is in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = f"{socket.gethostname()} {uuid.getnode()}".encode()
    return blake2b(boot, digest_size=6).hexdigest()


def _is_deserted(path: str) -> bool:
    """Whether nobody takes part in the directory of an earlier start of the machine."""
    try:
        if not is_private(os.lstat(path)):
            return False
        fd = os.open(os.path.join(path, _USERS), os.O_RDWR | OPEN_FLAGS)
    except OSError:
        return False
    try:
        return locked(fd, fcntl.LOCK_EX)
    finally:
        files.close(fd)
