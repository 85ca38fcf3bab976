"""zcache: a small, fast and trustworthy training cache for medical volumes.

Change one import line of a MONAI training script::

    from zcache import PersistentDataset      # was: from monai.data import PersistentDataset

Names are loaded on first use, so that ``import zcache`` costs neither torch nor monai.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcache.cache import Cache
    from zcache.errors import (
        CacheConfigError,
        CacheWriteError,
        EntryDamagedError,
        EntryNotFoundError,
        FingerprintError,
        MissingExtraError,
        UnstorableError,
        ZCacheError,
        ZCacheWarning,
    )
    from zcache.inspection.entry import EntryView
    from zcache.inspection.view import CacheView, open_cache
    from zcache.stats import CacheStats
    from zcache.training.dataset import PersistentDataset
    from zcache.training.memory import CacheDataset
    from zcache.training.n_trans import CacheNTransDataset
    from zcache.training.split import uncached

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheConfigError",
    "CacheDataset",
    "CacheNTransDataset",
    "CacheStats",
    "CacheView",
    "CacheWriteError",
    "EntryDamagedError",
    "EntryNotFoundError",
    "EntryView",
    "FingerprintError",
    "MissingExtraError",
    "PersistentDataset",
    "UnstorableError",
    "ZCacheError",
    "ZCacheWarning",
    "open_cache",
    "uncached",
]

_ROOMS = {
    "Cache": "zcache.cache",
    "CacheConfigError": "zcache.errors",
    "CacheDataset": "zcache.training.memory",
    "CacheNTransDataset": "zcache.training.n_trans",
    "CacheStats": "zcache.stats",
    "CacheView": "zcache.inspection.view",
    "CacheWriteError": "zcache.errors",
    "EntryDamagedError": "zcache.errors",
    "EntryNotFoundError": "zcache.errors",
    "EntryView": "zcache.inspection.entry",
    "FingerprintError": "zcache.errors",
    "MissingExtraError": "zcache.errors",
    "PersistentDataset": "zcache.training.dataset",
    "UnstorableError": "zcache.errors",
    "ZCacheError": "zcache.errors",
    "ZCacheWarning": "zcache.errors",
    "open_cache": "zcache.inspection.view",
    "uncached": "zcache.training.split",
}


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'zcache' has no attribute {name!r}")
    try:
        value = getattr(import_module(room), name)
    except AttributeError as e:  # which `from zcache import …` would take for "there is no such name"
        raise ImportError(f"zcache.{name} cannot be imported, since a module that it needs failed: {e}") from e
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
