"""What went wrong in caching, on whatever thread, kept until the caller's own thread can hear of it."""

from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Final

from zcache.errors import CacheWriteError, EntryDamagedError, UnstorableError, ZCacheWarning

__all__ = ["Troubles", "skip_reason", "warn_caller"]

_PACKAGE: Final = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - compared with what code objects say
_REASON_OF_ERRNO: Final = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}


class Troubles:
    """Warns once of each kind of trouble, or raises each.

    A warning on a background thread would name no line of the caller's, and an exception there would end nothing but
    the thread: so both wait for the next call.

    Parameters
    ----------
    is_first : callable
        ``is_first(kind)`` tells whether this is the first trouble of its kind, in whatever process.
    raising : bool
        Raise instead of warning.
    """

    def __init__(self, is_first: Callable[[str], bool], *, raising: bool) -> None:
        self._is_first = is_first
        self._raising = raising
        self._lock = threading.Lock()
        self._noted: list[tuple[str, BaseException]] = []

    def note(self, kind: str, text: str, error: BaseException) -> None:
        """Keep a trouble, the first of its kind."""
        with self._lock:
            if self._raising or self._is_first(kind):
                self._noted.append((text, error))

    def report(self) -> None:
        """Warn of what was noted since the last call, or raise the first.

        Raises
        ------
        UnstorableError, EntryDamagedError, CacheWriteError
            If `raising`.
        """
        if not self._noted:
            return
        with self._lock:
            noted, self._noted = self._noted, []
        for text, error in noted:
            why = str(error) or type(error).__name__
            if self._raising:
                if isinstance(error, UnstorableError):
                    raise error
                if isinstance(error, EntryDamagedError):
                    raise EntryDamagedError(f"{text}: {why}") from error
                raise CacheWriteError(f"{text}: {why}") from error
            warn_caller(f"{text}: {why}. Training goes on without it; further cases are only counted, in stats.")


def warn_caller(message: str) -> None:
    """Warn at the line, outside of zcache, that called into it."""
    level = 2  # of the caller of this function
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as warnings itself finds its place
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ZCacheWarning, stacklevel=level)


def skip_reason(error: Exception) -> str:
    """Return the one of `stats.SKIP_REASONS` that fits an error.

    Examples
    --------
    >>> skip_reason(OSError(errno.ENOSPC, "No space left on device"))
    'no_space'
    """
    if isinstance(error, UnstorableError):
        return "unstorable"
    if isinstance(error, OSError):
        return _REASON_OF_ERRNO.get(error.errno or 0, "io_error")
    return "memory" if isinstance(error, MemoryError) else "internal"
