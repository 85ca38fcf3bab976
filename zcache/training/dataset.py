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
from zcache.encoding.narrowing import Precision
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import FingerprintError
from zcache.keys import Json, entry_key
from zcache.stats import CacheStats
from zcache.storage.entry import Entry
from zcache.training.crop import CropPushdown, WholeItem, find_crop
from zcache.training.explain import Explanation, explain
from zcache.training.keying import HashFunc, Keying, Pipeline
from zcache.training.leaves import torch_leaf_codecs, without_meta
from zcache.training.split import Uncached, first_random
from zcache.training.versions import other_versions
from zcache.troubles import warn_caller

__all__ = ["DEFAULT_DIR", "CacheDir", "HashFunc", "PersistentDataset", "default_cache_dir"]


class _Unset(Enum):
    """The value of an argument that was left out, where None means something."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return "<default>"


CacheDir: TypeAlias = str | os.PathLike[str] | _Unset | None

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
        Whether a changed size or modification time makes entries stale: of a source file, or of a file that a transform
        names. Where a path is relative without `root`, or leads through a symbolic link, a sample of the content, too.
    version_in_key : bool
        Whether the versions of MONAI, PyTorch, NumPy and the packages that transforms come from count in keys. If not,
        entries that another version made are found, and a warning says so once.
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
        version_in_key: bool = False,
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
        policy = str(Precision.parse(precision))
        self._keying = Keying(hash_func, hash_transform, self._root, check_sources, version_in_key, policy)
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
        self._known: dict[str, Any] = {"transform": None, "pipeline": None, "versions": False}
        pipeline = self._pipeline()
        for remark in () if pipeline is None else pipeline.remarks:
            warn_caller(
                f"{remark}: a change of it goes unnoticed. Make it a plain parameter, pass hash_transform=, or keep "
                "the transform out of the cached part with zcache.uncached."
            )

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
            if found is _MISS:
                return self._computed(item_transformed)
            self._look_at_versions()
            return found
        return result if self.track_meta else without_meta(result)

    def _computed(self, item: Any) -> Any:
        """Compute an item and hand it to the cache, under the key that it has now."""
        how = self._composition()
        try:
            if self._known["pipeline"] is not None:
                self._known["pipeline"] = self._keying.retaken(self._known["pipeline"], *how[0], **how[1])
        except FingerprintError as e:
            self._unkeyable("the pipeline", e)
            parts = None
        else:
            parts = self._key_parts(item)
        pipeline: Pipeline = self._known["pipeline"]
        transforms = self.transform.transforms[: how[0][1]]
        # Before it is computed, lest a file that changes meanwhile pass for what was read.
        about = None if parts is None else self._keying.about(item, pipeline, parts, transforms)
        with self._keying.running(*how[0], **how[1]):
            computed = self._pre_transform(deepcopy(item))
        if self._cache is not None and about is not None and parts is not None:
            if parts != self._key_parts(item):
                self._cache.skip("changed")
            else:
                crop = self._crop()
                guided: dict[str, Any] = {} if crop is None else {"query": crop.query, "patch": crop.patch}
                computed = self._cache.put(entry_key(parts), computed, about, owned=True, **guided)
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
            return self._post_transform(self._computed(item))
        self._look_at_versions()
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
        parts = self._key_parts(item)
        return None if parts is None else entry_key(parts)

    def _key_parts(self, item: Any) -> dict[str, Json] | None:
        """Return what the key of an item is made of, None if it is not to be cached."""
        if self._cache is None:
            return None
        try:
            pipeline = self._pipeline()
            if pipeline is not None:
                return self._keying.parts(item, pipeline)
        except FingerprintError as e:
            self._unkeyable("an item", e)
            return None
        if self.transform.transforms:  # said already, when the data set was built
            self._cache.skip("nothing_to_cache")
        return None

    def _unkeyable(self, what: str, error: FingerprintError) -> None:
        if self._cache is not None:
            self._cache.skip("unkeyable", what, error)

    def _pipeline(self) -> Pipeline | None:
        """Return the cached transforms as keys see them, None if none is cached.

        Anew after `transform` was set, or when a file or an environment variable changed that they name.
        """
        if self._cache is None:
            return None
        pipeline: Pipeline | None = self._known["pipeline"]
        if self._known["transform"] is self.transform and (pipeline is None or pipeline.is_current()):
            return pipeline
        (transform, count), composed = self._composition()
        if count:
            pipeline = self._keying.pipeline(transform, count, **composed)
        else:
            pipeline = None
            if transform.transforms:
                warn_caller(self._why_nothing())
        self._known |= {"transform": transform, "pipeline": pipeline}
        return pipeline

    def _composition(self) -> tuple[tuple[Compose, int], dict[str, Any]]:
        """Return what `Keying` takes: the pipeline, how many of its transforms are cached, and what else counts."""
        return (self.transform, self._cached_count()), {"reset_ops_id": self.reset_ops_id}

    def _look_at_versions(self) -> None:
        """Say once, when entries are found, that other versions of MONAI or another library made some of them."""
        if self._known["versions"] or self._cache is None or self._keying.version_in_key:
            return
        self._known["versions"] = True
        pipeline = self._pipeline()
        if pipeline is not None and self._cache.is_first("versions"):
            said = other_versions(self._cache, self._entry_key, self.data, pipeline.versions)
            if said:
                warn_caller(said)

    def explain(self, index: int) -> Explanation:
        """Say why an item is found in the cache, or why it has to be computed.

        Parameters
        ----------
        index : int
            Of the item in `data`.

        Returns
        -------
        Explanation
            Its key; where it is not there, the nearest entry of the same source files, and each ingredient of the key
            that differs: transform, attribute, function with file and line, source file, switch, version, precision.
            All documents of the cache are read.

        Raises
        ------
        IndexError
            There is no such item.

        Examples
        --------
        >>> import tempfile
        >>> from monai.transforms import Lambdad
        >>> with tempfile.TemporaryDirectory() as d:
        ...     for n in 1, 2:
        ...         ds = PersistentDataset([{"x": n, "of": "a.nii"}], [Lambdad("x", float)], d)
        ...         text = str(ds.explain(0))
        ...         _ = ds[0]
        ...         ds.close()
        ...     print(text.splitlines()[-1])
          item.x: 1 -> 2
        """
        item = self.data[index]
        parts = self._key_parts(item)
        pipeline = self._pipeline()
        if self._cache is None or parts is None or pipeline is None:
            return Explanation(None, note="nothing of this item is cached; ds.stats says why")
        return explain(self._cache, entry_key(parts), {**parts, "pipeline": pipeline.form}, item)

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
