"""Drop-in replacement for MONAI's `PersistentDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import platformdirs
from monai.data import Dataset
from monai.transforms import Compose, reset_ops_id
from torch.serialization import DEFAULT_PROTOCOL

from zcache.cache import Cache
from zcache.encoding.layout import FORMAT
from zcache.encoding.narrowing import Precision
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import CacheConfigError, FingerprintError
from zcache.keys import describe, digest, entry_key, fingerprint, item_fingerprint, source_paths, source_stamps
from zcache.stats import CacheStats
from zcache.storage.entry import Entry
from zcache.training.crop import CropPushdown, WholeItem, find_crop
from zcache.training.leaves import torch_leaf_codecs, without_meta
from zcache.training.split import Uncached, first_random, unfolded
from zcache.troubles import warn_caller

__all__ = ["DEFAULT_DIR", "CacheDir", "HashFunc", "PersistentDataset", "default_cache_dir"]


class _Unset(Enum):
    """The value of an argument that was left out, where None means something."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return "<default>"


CacheDir: TypeAlias = str | os.PathLike[str] | _Unset | None
HashFunc: TypeAlias = Callable[..., bytes]

DEFAULT_DIR = _Unset.DEFAULT
"""The value of `cache_dir` if it is left out: None means something."""

_MISS = object()


def default_cache_dir() -> Path:
    """Return where caches go that are given no directory: ``$ZCACHE_DIR``, else the user's cache directory."""
    return Path(os.environ.get("ZCACHE_DIR") or platformdirs.user_cache_dir("zcache", appauthor=False))


class PersistentDataset(Dataset):  # type: ignore[misc]
    """A data set that keeps what its deterministic transforms compute in a compressed Zarr store.

    Takes the place of `monai.data.PersistentDataset`: the same arguments in the same order, the same items. The
    results of the transforms before the first random one are written in the background while training goes on, and
    read back from then on, in this process, in DataLoader workers, in other ranks and on other hosts.

    An item comes back as it was computed: the same types, shapes and bits, metadata included; arrays C-contiguous and
    tensors detached, on a miss as on a hit. Unlike with MONAI, numpy arrays stay numpy arrays. The key of an entry
    covers the item, size and modification time of its source files, and every parameter of the transforms, so that
    a changed pipeline or file is computed anew, beside the old entries. Entries are never deleted by a data set.

    Parameters
    ----------
    data : sequence
        Items to load and transform, typically dicts of file paths.
    transform : callable or sequence of callable or None
        The pipeline. What comes before the first random transform is cached.
    cache_dir : path or None, optional
        Directory of the cache; made if missing. Left out: ``$ZCACHE_DIR``, else the user's cache directory. None: no
        caching, or in `memory` alone.
    hash_func : callable, optional
        ``hash_func(item) -> bytes`` in place of the fingerprint of an item.
    pickle_module : str
        Accepted for MONAI's signature; without effect, since nothing is pickled.
    pickle_protocol : int
        As `pickle_module`.
    hash_transform : callable, optional
        ``hash_transform(transforms) -> bytes`` in place of the fingerprint of the cached transforms, nested ones
        unfolded. MONAI's ``json_hashing`` cannot hash them: they are fingerprinted then (MONAI hashes their names).
    reset_ops_id : bool
        Forget the ids of transform objects in the trace of applied operations, so that other instances can invert.
    track_meta : bool
        If false, MetaTensors are returned as plain tensors. (MONAI's default is false.)
    weights_only : bool
        As `pickle_module`.
    codec : str
        Blosc compressor: ``"lz4"``, ``"lz4hc"``, ``"zstd"``, ``"zlib"``, ``"blosclz"``.
    clevel : int
        Compression level, 0 to 9.
    chunks : "auto" or sequence of int
        Extents of a chunk along the last axes of each array, in voxels. Left alone, the size of a random crop that
        follows guides them.
    precision : str or float
        ``"lossless"``; or, for non-integral floats only, the largest absolute error allowed, or ``"float16"``,
        ``"uint16"``, ``"uint8"``. Labels are never made lossy.
    writers : int
        Threads that compress and write, in each process.
    max_pending_bytes : int or str
        Memory that items waiting to be written may hold, in each process, in bytes or as in ``"1GiB"``.
    on_error : "warn" or "raise"
        ``"raise"`` turns every failure to cache into an exception.
    root : path, optional
        Directory of the source data. Paths inside of it enter keys relative to it, so that hosts that mount the data
        elsewhere share entries.
    check_sources : bool
        Whether a changed size or modification time of a source file makes its entry stale.
    read_only : bool
        Never write, not even to mend a damaged entry.
    crop_pushdown : bool
        If the first transform that is not cached is a random crop, read only what it keeps. The samples are the same.
    read_threads : int
        Threads that decode one read together, in the main process; DataLoader workers use one each.
    durability : "rename" or "fsync"
        ``"fsync"``: an entry is on the disk before it is published, power failures included.
    memory : int, str or None
        Bytes of memory, such as ``"8GiB"``, that all processes of the node share for items, in front of the disk;
        ``"auto"``: half of what is available.
    memory_dir : path, optional
        Where that memory is; ``/dev/shm`` if left out.
    keep_memory : bool
        Leave items in memory when the last process that uses it ends, for the next run.

    Raises
    ------
    FingerprintError
        No stable key can be made from a transform; the message names it and says what to do.
    CacheConfigError
        An argument cannot work.

    Examples
    --------
    >>> import tempfile, torch
    >>> from monai.transforms import Lambdad
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with PersistentDataset([{"x": 1.0}], [Lambdad("x", torch.tensor)], d) as ds:
    ...         a = ds[0]
    ...         ds.flush()
    ...         a == ds[0], ds.stats.misses, ds.stats.hits
    (True, 1, 1)
    """

    _copies_memory = True  # what comes from shared memory belongs to the caller

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any] | None,
        cache_dir: CacheDir = DEFAULT_DIR,
        hash_func: HashFunc | None = None,
        pickle_module: str = "pickle",
        pickle_protocol: int = DEFAULT_PROTOCOL,
        hash_transform: HashFunc | None = None,
        reset_ops_id: bool = True,
        track_meta: bool = True,
        weights_only: bool = True,
        *,
        codec: str = "lz4",
        clevel: int = 5,
        chunks: str | Iterable[int] = "auto",
        precision: str | float | Precision = "lossless",
        writers: int = 2,
        max_pending_bytes: int | str = "1GiB",
        on_error: Literal["warn", "raise"] = "warn",
        root: str | os.PathLike[str] | None = None,
        check_sources: bool = True,
        read_only: bool = False,
        crop_pushdown: bool = True,
        read_threads: int = 1,
        durability: Literal["rename", "fsync"] = "rename",
        memory: int | str | None = None,
        memory_dir: str | os.PathLike[str] | None = None,
        keep_memory: bool = False,
    ) -> None:
        super().__init__(data=data, transform=transform)
        self.crop_pushdown = crop_pushdown
        self.hash_func = hash_func
        self.hash_transform = hash_transform
        self.pickle_module = pickle_module
        self.pickle_protocol = pickle_protocol
        self.weights_only = weights_only
        self.reset_ops_id = reset_ops_id
        self.track_meta = track_meta
        self._root = None if root is None else os.fspath(root)
        if self._root is not None and not os.path.isdir(self._root):  # noqa: PTH112 - any PathLike
            raise CacheConfigError(
                f"root={self._root!r} is not a directory: give the one that the paths of data lie in"
            )
        for name, function in (("hash_func", hash_func), ("hash_transform", hash_transform)):
            if function is not None and not callable(function):
                raise CacheConfigError(f"{name}={function!r} is not a function of an item to bytes")
        self._check_sources = check_sources
        if cache_dir is DEFAULT_DIR:
            cache_dir = default_cache_dir()
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._cache: Cache | None = None
        if self.cache_dir is not None or memory is not None:
            if read_only and self.cache_dir is not None and not self.cache_dir.is_dir():
                warn_caller(f"cache_dir={str(self.cache_dir)!r} is not there and read_only=True: nothing can be cached")
            self._cache = Cache(
                self.cache_dir,
                codec=codec,
                clevel=clevel,
                chunks=chunks,
                precision=precision,
                writers=writers,
                max_pending_bytes=max_pending_bytes,
                on_error=on_error,
                read_only=read_only,
                read_threads=read_threads,
                durability=durability,
                memory=memory,
                memory_dir=memory_dir,
                keep_memory=keep_memory,
                copy_cache=self._copies_memory,
                leaf_codecs=torch_leaf_codecs(track_meta=track_meta),
            )
        # In a dict, where MONAI's DataLoader does not look when it seeds all that a data set refers to: seeding the
        # pipeline by a second reference would change what its random transforms draw.
        self._pipeline: dict[str, Any] = {"transform": None, "key": None}
        self._pipeline_key()

    @property
    def stats(self) -> CacheStats:
        """What the cache did so far: hits, misses, bytes, seconds waited, what was skipped and why."""
        return CacheStats() if self._cache is None else self._cache.stats

    def set_data(self, data: Sequence[Any]) -> None:
        """Set the input data. Entries of other data stay: they may be another run's, and are found again."""
        self.data = data

    def flush(self) -> None:
        """Wait until all items computed so far in this process are in the cache."""
        if self._cache is not None:
            self._cache.flush()

    def close(self) -> None:
        """Flush and release what this process holds of the cache. The data set may be used again."""
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        cached = f"{self._cached_count()} of {len(self.transform.transforms)} transforms cached"
        return f"{type(self).__name__}({len(self)} items, {cached}, cache_dir={self.cache_dir})"

    def _cached_count(self) -> int:
        """Return how many transforms, from the first, are cached."""
        index = first_random(self.transform)
        return len(self.transform.transforms) if index is None else index

    def _pre_transform(self, item_transformed: Any) -> Any:
        """Run the cached part of the pipeline."""
        count = self._cached_count()
        result = self.transform(item_transformed, end=count, threading=True) if count else item_transformed
        if self.reset_ops_id:
            reset_ops_id(result)
        return result

    def _post_transform(self, item_transformed: Any) -> Any:
        """Run the part of the pipeline that runs on every access."""
        count = self._cached_count()
        if count == len(self.transform.transforms):
            return item_transformed
        return self.transform(item_transformed, start=count)

    def _cachecheck(self, item_transformed: Any) -> Any:
        """Return an item as the cached transforms leave it: read back, or computed and handed to the cache."""
        key = self._entry_key(item_transformed)
        if self._cache is None or key is None:
            result = self._pre_transform(deepcopy(item_transformed))
        else:
            found = self._cache.get(key, _MISS)
            return found if found is not _MISS else self._computed(item_transformed, key)
        return result if self.track_meta else without_meta(result)

    def _computed(self, item: Any, key: str) -> Any:
        """Compute an item and hand it to the cache."""
        about = self._about(item)  # before it is computed, lest a file that changes meanwhile pass for what was read
        computed = self._pre_transform(deepcopy(item))
        if self._cache is not None:
            crop = self._crop()
            guided: dict[str, Any] = {} if crop is None else {"query": crop.query, "patch": crop.patch}
            computed = self._cache.put(key, computed, about, owned=True, **guided)
        # Once more for items that do not pass through an entry because they cannot be stored.
        return computed if self.track_meta else without_meta(computed)

    def _transform(self, index: int) -> Any:
        item = self.data[index]
        crop = self._crop()
        key = None if crop is None else self._entry_key(item)
        if self._cache is None or crop is None or key is None:
            return self._post_transform(self._cachecheck(item))
        cache = self._cache

        missing: list[VoxelQuery] = []

        def read(entry: Entry) -> tuple[Any, Any]:
            missing.clear()
            samples = crop.read(entry, missing.append)
            return samples, cache.load(entry) if isinstance(samples, WholeItem) else None

        found = cache.using(key, read, None)
        if found is None:
            return self._post_transform(self._computed(item, key))
        for query in missing:
            cache.add_index(key, query)
        samples, whole = found
        if isinstance(crop, WholeItem) or isinstance(samples, WholeItem):
            cache.count(**{samples.reason: 1})
            return self._post_transform(whole)
        cache.count(pushed_down=1)
        return crop.finish(samples)

    def _crop(self) -> CropPushdown | WholeItem | None:
        """Return the crop that may be pushed down to the reading of entries."""
        return find_crop(self.transform, self._cached_count(), self.track_meta) if self.crop_pushdown else None

    def _entry_key(self, item: Any) -> str | None:
        """Return the key of an item, None if it is not to be cached."""
        if self._cache is None:
            return None
        pipeline = self._pipeline_key()
        if pipeline is None:
            if self.transform.transforms:  # said already, when the data set was built
                self._cache.skip("nothing_to_cache")
            return None
        try:
            if self.hash_func is None:
                own = item_fingerprint(item, root=self._root, check_sources=self._check_sources)
            else:
                sources = list(source_paths(item))
                stamps = item_fingerprint(sources, root=self._root) if self._check_sources else None
                own = ["hash_func", self.hash_func(item).hex(), stamps]
        except FingerprintError as e:
            self._cache.skip("unkeyable", "an item", e)
            return None
        return entry_key(format=FORMAT, item=own, pipeline=pipeline, precision=str(self._cache.precision))

    def _pipeline_key(self) -> str | None:
        """Return the cached transforms' part of every key, None if none is cached; anew after `transform` was set."""
        if self._cache is None:
            return None
        key: str | None = self._pipeline["key"]
        if self._pipeline["transform"] is self.transform:
            return key
        count = self._cached_count()
        transforms = list(self.transform.transforms[:count])
        key = None
        if count == 0:
            if self.transform.transforms:
                warn_caller(self._why_nothing())
        else:
            hashed = self._hashed(transforms)
            what = transforms if hashed is None else hashed
            how = {n: getattr(self.transform, n) for n in ("map_items", "unpack_items", "lazy", "overrides")}
            key = digest(fingerprint([what, how, self.reset_ops_id]))
        self._pipeline = {"transform": self.transform, "key": key}
        return key

    def _hashed(self, transforms: list[Any]) -> str | None:
        """Return what `hash_transform` makes of the transforms, None if it is not given or cannot hash them."""
        if self.hash_transform is None:
            return None
        try:
            return self.hash_transform(unfolded(transforms)).hex()
        except TypeError as e:
            if "JSON serializable" not in str(e):
                raise
            return None  # json_hashing: MONAI would hash the names of the classes alone

    def _why_nothing(self) -> str:
        first = self.transform.transforms[0]
        what = getattr(first, "__name__", type(first).__name__)
        if isinstance(first, Uncached):
            what = f"uncached({type(first.transform).__name__})"
        if type(self.transform) is not Compose:
            what = type(self.transform).__name__
        return (
            f"nothing of this pipeline can be cached, since its first transform, {what}, is random or not a "
            "monai.transforms.Transform: every access computes everything. Put deterministic transforms first (a plain "
            "function as monai.transforms.Lambda or Lambdad)"
        )

    def _about(self, item: Any) -> dict[str, Any]:
        transforms = list(self.transform.transforms[: self._cached_count()])
        stamps = {"sources": source_stamps(item, root=self._root)} if self._check_sources else {}
        return {"source": list(source_paths(item)), **stamps, "pipeline": describe(transforms)}
