"""The errors that zcache raises: one tree, so that ``except ZCacheError`` catches them all."""

from __future__ import annotations

__all__ = [
    "CacheConfigError",
    "CacheWriteError",
    "EntryDamagedError",
    "EntryNotFoundError",
    "FingerprintError",
    "MissingExtraError",
    "UnstorableError",
    "ZCacheError",
    "ZCacheWarning",
]

DISTRIBUTION = "monai-zcache"
"""The name to install this package by. ``zcache`` is somebody else's, whose code has the same import name."""


class ZCacheError(Exception):
    """Base class of every error that zcache raises on purpose."""


class CacheConfigError(ZCacheError, ValueError):
    """An argument has a value that cannot work; the message says which values do."""


class FingerprintError(ZCacheError, TypeError):
    """A transform or an item holds something that no stable key can be made from."""


class UnstorableError(ZCacheError, TypeError):
    """An item holds a value that the format cannot express; the message names its path and its type."""


class EntryDamagedError(ZCacheError, OSError):
    """An entry is torn, truncated, foreign or of another format version: a miss, never a decode."""


class EntryNotFoundError(ZCacheError, KeyError):
    """A cache that is inspected has no such entry or array; the message lists what comes close."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show it in quotes


class MissingExtraError(ZCacheError, ImportError):
    """A package is not installed that only this function needs; the message says how to install it."""


class CacheWriteError(ZCacheError, OSError):
    """An entry could not be written; raised with ``on_error="raise"`` only."""


class ZCacheWarning(UserWarning):
    """Caching could not do something; training goes on without it. ``ds.stats`` has the counts."""
