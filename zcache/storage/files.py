"""Every system call on the files of a store, in one place.

Two promises are kept here. What is read lies in the cache directory: no link below it is followed, and nothing but a
regular file is opened. And every call goes through the names `os` and `shutil` of this module, so that tests can let
any of them fail at any step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Self

from zcache.errors import EntryDamagedError

__all__ = [
    "FileWriter",
    "accessed_s",
    "close",
    "exists",
    "file_size",
    "is_directory",
    "is_link",
    "list_directory",
    "make_directory",
    "modified_s",
    "open_below",
    "read_below",
    "read_exactly",
    "remove_tree",
    "rename",
    "sync_directory",
    "write_file",
]

# To pass through a directory it need not be readable; O_PATH, where it exists, also spares NFS an OPEN.
_PASS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
# Without O_NONBLOCK, opening a pipe that somebody put in the place of a file would wait for a writer for ever.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_BUFFER_BYTES = 1024 * 1024


def open_below(directory: str | os.PathLike[str], parts: Sequence[str]) -> int:
    """Open a regular file for reading, following no link below a directory.

    Parameters
    ----------
    directory : path
        Where to begin; may be reached through links.
    parts : sequence of str
        Names of the directories on the way, and of the file.

    Returns
    -------
    int
        A file descriptor.

    Raises
    ------
    EntryDamagedError
        It is a pipe or a device.
    OSError
        It is not there (FileNotFoundError), a link (ELOOP, ENOTDIR), or cannot be opened.
    """
    above = os.open(directory, _PASS)
    try:
        for name in parts[:-1]:
            inner = os.open(name, _PASS | os.O_NOFOLLOW, dir_fd=above)
            close(above)
            above = inner
        fd = os.open(parts[-1], _READ, dir_fd=above)
    finally:
        close(above)
    try:
        mode = os.fstat(fd).st_mode
    except BaseException:
        close(fd)
        raise
    if not stat.S_ISREG(mode):
        close(fd)
        raise EntryDamagedError(f"{parts[-1]!r} is no regular file")
    return fd


def close(fd: int) -> None:
    """Close a file that was opened for reading; what goes wrong then is of no interest."""
    with contextlib.suppress(OSError):
        os.close(fd)


def file_size(fd: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(fd).st_size


def read_exactly(fd: int, start: int, stop: int) -> bytes:
    """Read one byte range; a file that ends early is damage."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise EntryDamagedError(f"a file ends at byte {start + len(data)}, before byte {stop}")
        data += more
    return data


def read_below(directory: str | os.PathLike[str], parts: Sequence[str], max_bytes: int) -> bytes:
    """Read a file as `open_below` opens it.

    Raises
    ------
    EntryDamagedError
        It is no regular file, or has more than `max_bytes`.
    OSError
        It cannot be read.
    """
    fd = open_below(directory, parts)
    try:
        size = file_size(fd)
        if size > max_bytes:
            raise EntryDamagedError(f"{parts[-1]!r} has {size} bytes; {max_bytes} at most")
        return read_exactly(fd, 0, size)
    finally:
        close(fd)


class FileWriter:
    """A new file, written in large pieces.

    Parameters
    ----------
    path : path
        Must not exist.
    durable : bool
        Have the bytes on the disk, not only with the system, before it is closed.

    Raises
    ------
    OSError
        Any step is refused: of the constructor, of `write`, or of the end of a ``with`` block, where network file
        systems report that the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool) -> None:
        self._durable = durable
        self._buffer = bytearray()
        self._fd = os.open(path, _CREATE, 0o666)

    def write(self, data: bytes) -> int:
        """Append bytes; return how many these are."""
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()
        return len(data)

    def _flush(self) -> None:
        with memoryview(self._buffer) as left:
            done = 0
            while done < len(left):
                written = os.write(self._fd, left[done:])
                if not written:  # not for ever
                    raise OSError(errno.EIO, "a write of no bytes")
                done += written
        self._buffer.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                if self._durable:
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)


def write_file(path: str | os.PathLike[str], data: bytes, *, durable: bool = False) -> int:
    """Write a new file; return its size."""
    with FileWriter(path, durable=durable) as f:
        return f.write(data)


def make_directory(path: str | os.PathLike[str], *, parents: bool = False) -> None:
    """Make a directory; with `parents`, those above it too, and none of them need be missing."""
    if not parents:
        os.mkdir(path)
        return
    try:
        _make_if_missing(path)
    except FileNotFoundError:
        place = os.path.normpath(path)
        above = os.path.dirname(place)
        if above in ("", place):  # the directory that this process works in is gone
            raise
        make_directory(above, parents=True)
        _make_if_missing(path)


def _make_if_missing(path: str | os.PathLike[str]) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:  # another process may have made it meanwhile
        if not is_directory(path):
            raise


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """rename(2)."""
    os.rename(source, target)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory and all that it holds, as far as that can be done."""
    with contextlib.suppress(OSError):  # some steps are not covered by ignore_errors
        shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Have the names in a directory on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def list_directory(path: str | os.PathLike[str]) -> Iterator[tuple[str, bool]]:
    """Yield the names in a directory, each with whether it is a directory itself and not a link to one."""
    with os.scandir(path) as found:
        for entry in found:
            is_dir = False
            with contextlib.suppress(OSError):
                is_dir = entry.is_dir(follow_symlinks=False)
            yield entry.name, is_dir


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether anything bears this name, be it a link that leads nowhere."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether it is a directory, or a link to one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether it is a symbolic link."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def accessed_s(path: str | os.PathLike[str]) -> float:
    """Return when a file was last read, in seconds since the epoch, as far as the file system keeps account of it."""
    return os.lstat(path).st_atime


def modified_s(path: str | os.PathLike[str]) -> float:
    """Return when a file or directory was last changed, in seconds since the epoch."""
    return os.lstat(path).st_mtime
