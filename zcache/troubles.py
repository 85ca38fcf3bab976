"""What went wrong in caching, on whatever thread, kept until the caller's own thread can hear of it."""

from __future__ import annotations

import errno
import threading
import warnings
from typing import Final

from zcache.errors import CacheWriteError, EntryDamagedError, UnstorableError, ZCacheWarning

__all__ = ["Troubles", "skip_reason"]

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
    raising : bool
        Raise instead of warning.
    """

    def __init__(self, *, raising: bool) -> None:
        self._raising = raising
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._noted: list[tuple[str, BaseException]] = []

    def note(self, kind: str, text: str, error: BaseException) -> None:
        """Keep a trouble, the first of its kind."""
        with self._lock:
            if self._raising or kind not in self._warned:
                self._warned.add(kind)
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
                if isinstance(error, UnstorableError | EntryDamagedError):
                    raise error
                raise CacheWriteError(f"{text}: {why}") from error
            warnings.warn(
                f"{text}: {why}. Training goes on without it; further cases are only counted, in stats.",
                ZCacheWarning,
                stacklevel=4,
            )


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
