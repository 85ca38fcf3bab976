"""Drop-in replacement for MONAI's `CacheDataset`: one copy in memory for all processes of the node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from multiprocessing.pool import ThreadPool
from typing import Any, Literal

from monai.data import Dataset

from zcache.encoding.narrowing import Precision
from zcache.errors import CacheConfigError
from zcache.keys import digest, item_fingerprint, source_paths
from zcache.storage.threads import cpu_count
from zcache.training.dataset import HashFunc, PersistentDataset
from zcache.troubles import warn_caller

__all__ = ["CacheDataset"]

_ON_THE_FLY = (
    "This CacheDataset is filled on the fly and looks at the files of an item on every access: they must stay. With "
    "runtime_cache=False it is filled before the constructor returns, and they may go then."
)
_NOT_HELD = (
    "This CacheDataset was filled up front, but does not hold this item, which is computed on each access: there was "
    "no room for it in memory=, or the transforms have changed since."
)


class CacheDataset(PersistentDataset):
    """A data set that keeps what its deterministic transforms compute in memory, once for all processes of the node.

    Takes the place of `monai.data.CacheDataset`: the same arguments in the same order. Each item is held in the
    narrowest type that gives every bit back, in files of shared memory named by what the item and the transforms are.
    DataLoader workers, forked or spawned, and ranks that were started independently find them there; there is nothing
    to pass around. The memory is given back when the last process ends; what a killed one left, with the next run.

    Unlike with MONAI, items are cached on the fly unless ``runtime_cache=False``, a crop that follows reads only what
    it keeps, and numpy arrays stay numpy arrays.

    Parameters
    ----------
    data : sequence
        Items to load and transform.
    transform : callable or sequence of callable or None
        The pipeline. What comes before the first random transform is cached.
    cache_num : int
        How many items are cached, from the first.
    cache_rate : float
        Which part of all items is cached, from 0 to 1; the smaller of both counts.
    num_workers : int or None
        Threads that fill up front; None: one for each CPU.
    progress : bool
        Show a progress bar while filling up front (needs tqdm).
    copy_cache : bool
        Return arrays that belong to the caller. If false, arrays that are held in the type that they have are views of
        the shared memory, copy-on-write: what is written to them is seen by nobody else and not kept.
    as_contiguous : bool
        Accepted for MONAI's signature; arrays always come back C-contiguous.
    hash_as_key : bool
        Count equal items once in `cache_num`. They are held once in any case.
    hash_func : callable, optional
        With `hash_as_key`: ``hash_func(item) -> bytes`` in place of the fingerprint of an item.
    runtime_cache : bool, str or object
        False: compute all items before the constructor returns; what fits into `memory` needs its files no longer.
        Anything else: on the fly, and files must stay; MONAI's modes and lists have no other effect. (MONAI's default
        is false.)
    memory : int or str
        Bytes that all processes of the node may take together, such as ``"64GiB"``; ``"auto"``: half of what is
        available. What does not fit is computed on each access.
    memory_dir : path, optional
        Where that memory is; ``/dev/shm`` if left out.
    keep_memory : bool
        Leave items in memory when the last process that uses it ends, for the next run.
    hash_transform : callable, optional
        As of `PersistentDataset`.
    reset_ops_id : bool
        As of `PersistentDataset`.
    track_meta : bool
        As of `PersistentDataset`.
    precision : str or float
        As of `PersistentDataset`.
    writers : int
        Threads that put items into memory, in each process.
    max_pending_bytes : int or str
        Memory that items waiting for that may hold, in each process.
    on_error : "warn" or "raise"
        ``"raise"`` turns every failure to cache into an exception.
    root : path, optional
        As of `PersistentDataset`.
    check_sources : bool
        As of `PersistentDataset`.
    crop_pushdown : bool
        If the first transform that is not cached is a random crop, copy only what it keeps.

    Raises
    ------
    FingerprintError
        No stable key can be made from a transform; the message names it and says what to do.
    CacheConfigError
        An argument cannot work.

    Examples
    --------
    >>> import torch
    >>> from monai.transforms import Lambdad
    >>> with CacheDataset([{"x": 1.0}], [Lambdad("x", torch.tensor)], memory="1MiB") as ds:
    ...     a = ds[0]
    ...     ds.flush()
    ...     a == ds[0], ds.stats.misses, ds.stats.memory_hits
    (True, 1, 1)
    """

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        cache_num: int = sys.maxsize,
        cache_rate: float = 1.0,
        num_workers: int | None = 1,
        progress: bool = True,
        copy_cache: bool = True,
        as_contiguous: bool = True,
        hash_as_key: bool = False,
        hash_func: HashFunc | None = None,
        runtime_cache: Any = True,
        *,
        memory: int | str = "auto",
        memory_dir: str | os.PathLike[str] | None = None,
        keep_memory: bool = False,
        hash_transform: HashFunc | None = None,
        reset_ops_id: bool = True,
        track_meta: bool = True,
        precision: str | float | Precision = "lossless",
        writers: int = 2,
        max_pending_bytes: int | str = "1GiB",
        on_error: Literal["warn", "raise"] = "warn",
        root: str | os.PathLike[str] | None = None,
        check_sources: bool = True,
        crop_pushdown: bool = True,
    ) -> None:
        if cache_rate < 0 or cache_num < 0:
            raise CacheConfigError(f"cache_rate={cache_rate!r} and cache_num={cache_num!r} must be 0 or more")
        self._copies_memory = copy_cache
        super().__init__(
            data,
            transform,
            None,
            hash_func if hash_as_key else None,
            hash_transform=hash_transform,
            reset_ops_id=reset_ops_id,
            track_meta=track_meta,
            precision=precision,
            writers=writers,
            max_pending_bytes=max_pending_bytes,
            on_error=on_error,
            root=root,
            check_sources=check_sources,
            crop_pushdown=crop_pushdown,
            memory=memory,
            memory_dir=memory_dir,
            keep_memory=keep_memory,
        )
        self.set_num = cache_num
        self.set_rate = cache_rate
        self.num_workers = cpu_count() if num_workers is None else max(int(num_workers), 1)
        self.progress = progress
        self.copy_cache = copy_cache
        self.as_contiguous = as_contiguous
        self.hash_as_key = hash_as_key
        self.runtime_cache = runtime_cache
        self.cache_num = 0
        self._hash_keys: frozenset[Any] | None = None
        self._filled: dict[tuple[str, Any], tuple[str, tuple[str, ...]]] = {}
        self.set_data(data)

    def set_data(self, data: Sequence[Any]) -> None:
        """Set the input data, and compute it if the cache is filled up front. What other data left in memory stays."""
        self.data = data
        chosen = self._chosen()
        self.cache_num = len(chosen)
        self._filled = {}
        if not self._on_the_fly():
            self._fill(chosen)

    def __repr__(self) -> str:
        cached = f"{self._cached_count()} of {len(self.transform.transforms)} transforms cached"
        return f"{type(self).__name__}({self.cache_num} of {len(self)} items in memory, {cached})"

    def _transform(self, index: int) -> Any:
        if self._is_chosen(index):
            return super()._transform(index)
        return Dataset._transform(self, index)  # noqa: SLF001 - as MONAI does it, without any cache

    def _chosen(self) -> list[int]:
        """Return the indices of the items that are cached, equal ones once if they are told by their hashes."""
        n = len(self.data)
        if not self.hash_as_key:
            return list(range(min(int(self.set_num), int(n * self.set_rate), n)))
        last = {self._hash(item): i for i, item in enumerate(self.data)}
        keys = list(last)[: min(int(self.set_num), int(len(last) * self.set_rate))]
        self._hash_keys = frozenset(keys)
        return [last[key] for key in keys]

    def _is_chosen(self, index: int) -> bool:
        if self._hash_keys is not None:
            return self._hash(self.data[index]) in self._hash_keys
        return index % len(self) < self.cache_num

    def _hash(self, item: Any) -> Any:
        if self.hash_func is not None:
            return self.hash_func(item)
        return digest(item_fingerprint(item, root=self._root, check_sources=False))

    def _on_the_fly(self) -> bool:
        return self.runtime_cache is not False and self.runtime_cache is not None

    def _fill(self, indices: list[int]) -> None:
        """Compute items on several threads, but for those that are there; stop when memory is full."""
        refused = self.stats.memory_refused
        with ThreadPool(self.num_workers) as pool:
            for _ in self._watched(pool.imap_unordered(self._fill_item, _from_own_share(indices)), len(indices)):
                if self.stats.memory_refused > refused:
                    break
        self.flush()

    def _fill_item(self, index: int) -> None:
        item = self.data[index]
        key = super()._entry_key(item)
        if self._cache is None or key is None:
            return
        files = tuple(path for path in source_paths(item) if os.path.exists(path))  # noqa: PTH110 - any text
        if key not in self._cache:
            super()._computed(item)
        self._filled[self._told(item)] = key, files

    def _entry_key(self, item: Any) -> str | None:
        """Return the key of an item; the one that it had when it was filled up front if a file of it is gone since."""
        key = super()._entry_key(item)
        if not self._filled or key is None or self._cache is None or key in self._cache:
            return key
        then, files = self._filled.get(self._told(item), (key, ()))
        return key if all(map(os.path.exists, files)) else then

    def _told(self, item: Any) -> tuple[str, Any]:
        """Tell an item and its pipeline apart from others, whether or not its files are there."""
        pipeline = self._pipeline()
        return "" if pipeline is None else pipeline.digest, self._hash(item)

    def _computed(self, item: Any) -> Any:
        """Compute an item; where it cannot be since a file of it is gone, say how long files are needed."""
        try:
            return super()._computed(item)
        except (OSError, RuntimeError) as e:  # MONAI makes a RuntimeError of whatever a transform raises
            gone = next((path for path in source_paths(item) if not os.path.exists(path)), None)  # noqa: PTH110
            if gone is not None:
                e.add_note(f"{gone!r} is not there. {_ON_THE_FLY if self._on_the_fly() else _NOT_HELD}")
            raise

    def _watched(self, steps: Iterable[None], total: int) -> Iterable[None]:
        if not self.progress:
            return steps
        try:
            tqdm = import_module("tqdm").tqdm
        except ImportError:
            warn_caller("tqdm is not installed: there is no progress bar while the cache is filled")
            return steps
        watched: Iterator[None] = tqdm(steps, total=total, desc="Loading dataset")
        return watched


def _from_own_share(indices: list[int]) -> list[int]:
    """Return the indices in an order that begins elsewhere in each rank of a node: ranks fill one memory together."""
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    first = len(indices) * rank // max(ranks, 1)
    return indices[first:] + indices[:first]
