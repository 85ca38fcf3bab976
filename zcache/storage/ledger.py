"""What all files of a shared directory take, written down for every process, and the lock that orders changes of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from typing import Final

from zcache.storage import files
from zcache.storage.membership import OPEN_FLAGS, PATIENCE_S, POLL_S, locked

__all__ = ["Ledger", "locked_ledger", "read_ledger"]

_FILE: Final = "ledger"
_ENTRIES: Final = struct.Struct("<QQ")


class Ledger:
    """The ledger while it is locked.

    Attributes
    ----------
    total_bytes : int
        What all files take, those included that are being written.
    n_evicted : int
        How many files were given up so far.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.total_bytes, self.n_evicted = _read(fd)

    def write(self, total_bytes: int, n_evicted: int) -> None:
        """Write both down."""
        self.total_bytes, self.n_evicted = total_bytes, n_evicted
        os.pwrite(self._fd, _ENTRIES.pack(total_bytes, n_evicted), 0)


def read_ledger(directory_fd: int) -> tuple[int, int]:
    """Return bytes and given-up files without a lock, 0 if nothing was written down."""
    try:
        fd = os.open(_FILE, os.O_RDONLY | OPEN_FLAGS, dir_fd=directory_fd)
    except FileNotFoundError:
        return 0, 0
    try:
        return _read(fd)
    finally:
        files.close(fd)


@contextlib.contextmanager
def locked_ledger(directory_fd: int) -> Iterator[Ledger]:
    """Lock the ledger; it is opened anew each time, so that threads and forked processes lock each other out.

    Raises
    ------
    OSError
        It is not to be had: its holder was stopped.
    """
    fd = os.open(_FILE, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600, dir_fd=directory_fd)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not locked(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise OSError(errno.EAGAIN, "the ledger of the shared memory is locked")
            time.sleep(POLL_S)
        try:
            yield Ledger(fd)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it open, too
    finally:
        files.close(fd)


def _read(fd: int) -> tuple[int, int]:
    data = os.pread(fd, _ENTRIES.size, 0)
    return _ENTRIES.unpack(data) if len(data) == _ENTRIES.size else (0, 0)
