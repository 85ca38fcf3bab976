"""Every system call of a store, each of which can be made to fail.

`zcache.storage.files` makes all of them through its names `os` and `shutil`. Here stand doubles of both: whatever
function is called through them counts as a system call, so that none can be forgotten. The reading of a directory is
followed name by name, and the removal of a tree call by call, in a second instance of the standard library's module.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from zcache.storage import files

ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.ESTALE,
    errno.ENOENT,
    errno.EMFILE,
)
RENAME_ERRORS = (errno.EPERM, errno.EXDEV, errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST)
REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}
_NO_CALLS = frozenset(("fspath", "fsdecode", "fsencode", "geteuid", "access"))
_END = object()


@dataclass(frozen=True)
class Fault:
    """What befalls the n-th call, or all from the n-th on.

    Attributes
    ----------
    n : int
        From 1.
    lasting : bool
        Or once only.
    error : int
        The errno of the refusal; 0 for none.
    late : bool
        The call is refused although it was carried out, as when a server's answer is lost and the request repeated.
    share : callable, optional
        ``share(n)`` tells how many of n bytes a call reads or writes.
    """

    n: int
    lasting: bool = False
    error: int = 0
    late: bool = False
    share: Callable[[int], int] | None = None

    def __str__(self) -> str:
        what = errno.errorcode[self.error] if self.error else "short"
        return f"{what} at call {self.n}" + " and from there on" * self.lasting + ", but done" * self.late


@dataclass
class SystemCalls:
    """The calls that were made, and the fault that befalls them.

    Attributes
    ----------
    fault : Fault, optional
        None: they are only recorded.
    names : list of str
        The calls, in their order.
    struck : list of str
        Those that the fault befell.
    removals : int
        How many of these belong to the removal of a tree.
    """

    fault: Fault | None = None
    names: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    removals: int = 0
    _removing: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        """Stand in for the function of `os` that bears a name."""
        real = getattr(os, name)
        if not callable(real) or isinstance(real, type) or name in _NO_CALLS:
            return real
        return lambda *args, **kwargs: self.call(name, real, *args, **kwargs)

    def scandir(self, path: Any) -> _Directory:
        return _Directory(self, self.call("scandir", os.scandir, path))

    def rmtree(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for `shutil.rmtree`."""
        self._removing += 1
        try:
            _SHUTIL.rmtree(*args, **kwargs)
        finally:
            self._removing -= 1

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.names.append(name)
            fault, n = self.fault, len(self.names)
            strikes = fault is not None and (n >= fault.n if fault.lasting else n == fault.n)
            strikes = strikes and (fault.share is None or name in ("pread", "write"))
            if strikes:
                self.struck.append(name)
                self.removals += self._removing > 0
        if fault is None or not strikes:
            return None if name == "fsync" else real(*args, **kwargs)  # waiting for a disk would prove nothing here
        if fault.share is not None:
            return _short(name, fault.share, *args)
        if fault.late or name == "close":  # Linux gives a descriptor back even if its closing is refused
            real(*args, **kwargs)
        raise OSError(fault.error, os.strerror(fault.error))


def _short(name: str, share: Callable[[int], int], fd: int, what: Any, *offset: int) -> Any:
    return os.write(fd, what[: share(len(what))]) if name == "write" else os.pread(fd, share(what), *offset)


class _Directory(contextlib.AbstractContextManager):
    """A directory that is read name by name."""

    def __init__(self, calls: SystemCalls, found: Any) -> None:
        self._calls = calls
        self._found = found

    def __iter__(self) -> Iterator[_Name]:
        while True:
            entry = self._calls.call("readdir", next, self._found, _END)
            if entry is _END:
                return
            yield _Name(self._calls, entry)

    def __exit__(self, *_: object) -> None:
        self._found.close()


class _Name:
    """What a directory holds under one name."""

    def __init__(self, calls: SystemCalls, entry: os.DirEntry[str]) -> None:
        self.name = entry.name
        self.path = entry.path
        self._calls = calls
        self._entry = entry

    def is_dir(self, **kwargs: bool) -> bool:
        return self._calls.call("is_dir", self._entry.is_dir, **kwargs)

    def stat(self, **kwargs: bool) -> os.stat_result:
        return self._calls.call("lstat", self._entry.stat, **kwargs)


def _second_shutil() -> ModuleType:
    spec = importlib.util.find_spec("shutil")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SHUTIL = _second_shutil()


@contextlib.contextmanager
def system_calls(fault: Fault | None = None, seams: Sequence[ModuleType] = (files,)) -> Iterator[SystemCalls]:
    """Stand between a store, or the modules of another seam, and the system."""
    calls = SystemCalls(fault)
    stood = [(module, name) for module in seams for name in ("os", "shutil") if hasattr(module, name)]
    before = [getattr(module, name) for module, name in stood]
    for module, name in stood:
        setattr(module, name, calls)
    _SHUTIL.os = calls
    try:
        yield calls
    finally:
        for (module, name), real in zip(stood, before, strict=True):
            setattr(module, name, real)
        _SHUTIL.os = os


def faults_of(names: list[str], errors: tuple[int, ...] = ERRORS) -> Iterator[Fault]:
    """Yield every fault that can befall a sequence of calls: each call, each way, once and from there on."""
    for n, name in enumerate(names, 1):
        for lasting in (False, True):
            for error in errors:
                yield Fault(n, lasting, error)
            if name == "rename":
                for error in RENAME_ERRORS:
                    yield Fault(n, lasting, error)
            if name in ("pread", "write"):
                for share in (half, nothing):
                    yield Fault(n, lasting, share=share)
        if name in ("pread", "write"):
            yield Fault(n, share=one)
        if name in ("mkdir", "rename"):
            yield Fault(n, error=errno.EIO, late=True)
            yield Fault(n, error=errno.ENOENT, late=True)


def half(n: int) -> int:
    return -(-n // 2)


def one(n: int) -> int:
    return min(n, 1)


def nothing(_: int) -> int:
    return 0


def open_files(folder: Path) -> int:
    """Return how many files and directories below a folder this process has open."""
    targets = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that the names are read with
            targets.append(fd.readlink())
    return sum(target.is_relative_to(folder) for target in targets)
