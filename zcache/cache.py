"""The cache: get an item, put an item, flush; a shared store on disk that never stops the program using it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import numpy as np

from zcache.encoding.chunking import Region, parse_chunks
from zcache.encoding.layout import parse_entry
from zcache.encoding.narrowing import Precision
from zcache.encoding.payload import Json, LeafCodec, decode_item, encode_item
from zcache.encoding.shard import BloscCodec
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import CacheConfigError
from zcache.stats import SKIP_REASONS, CacheStats, Counters
from zcache.storage.entry import Entry, OpenEntries
from zcache.storage.lookup import Lookup
from zcache.storage.pending import PendingItem
from zcache.storage.ram import MemorySettings, RamTier
from zcache.storage.recorder import Recorder
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads
from zcache.storage.writer import WriteSettings
from zcache.troubles import Troubles, skip_reason
from zcache.units import parse_bytes

__all__ = ["Cache"]

D = TypeVar("D")
T = TypeVar("T")


class Cache:
    """A store of items by key, filled in the background.

    The torch-free heart of `zcache.PersistentDataset`: safe in threads, in forked and spawned processes, and between
    hosts that share the directory.

    Parameters
    ----------
    cache_dir : path or None
        Directory of the store; made when the first item is written. None: nothing is kept on disk, only in `memory`.
    codec : str
        Blosc compressor: ``"lz4"`` (default, fast), ``"lz4hc"``, ``"zstd"``, ``"zlib"``, ``"blosclz"``.
    clevel : int
        Compression level, 0 to 9.
    chunks : "auto" or sequence of int
        Extents of a chunk along the last axes of each array, in voxels.
    precision : str or float
        ``"lossless"``; or, for non-integral floats only, the largest absolute error allowed, or ``"float16"``,
        ``"uint16"``, ``"uint8"``.
    writers : int
        Threads that encode and write.
    max_pending_bytes : int or str
        Memory that items waiting to be written may hold, in bytes or as in ``"1GiB"``.
    on_error : "warn" or "raise"
        ``"warn"``: what cannot be cached is counted and warned of once, and the program goes on.
    read_only : bool
        Never write, not even to mend a damaged entry.
    read_threads : int
        Threads that decode the chunks of one read together, at most as many as this process has CPUs. For reading in
        the main process; a DataLoader's workers, which read side by side, use one each whatever is said here.
    durability : "rename" or "fsync"
        ``"rename"``: an entry is published at once; a power failure soon after may lose or damage it, which is noticed,
        and it is computed anew. ``"fsync"``: its files are on the disk before it is published, which takes longer.
    memory : int, str or None
        Bytes of memory, such as ``"8GiB"``, that all processes of the node share for uncompressed items, in front of
        the disk; ``"auto"``: half of what is available. None: none.
    memory_dir : path, optional
        Where that memory is: a directory on a file system in memory. If left out: ``$ZCACHE_MEMORY_DIR``, else
        ``/dev/shm``.
    keep_memory : bool
        Leave items in memory when the last process that uses it ends, for the next run.
    copy_cache : bool
        If false, arrays that lie in memory as they are returned are views of it, copy-on-write.
    leaf_codecs : iterable of LeafCodec
        Types beyond Python's and numpy's that items may hold.

    Raises
    ------
    CacheConfigError
        An argument cannot work; the message says what can.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as d, Cache(d) as cache:
    ...     item = cache.put("0" * 32, {"image": np.arange(10000.0), "age": 63})
    ...     cache.flush()
    ...     cache.get("0" * 32)["age"], cache.stats.stored
    (63, 1)
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None,
        *,
        codec: str = "lz4",
        clevel: int = 5,
        chunks: str | Iterable[int] = "auto",
        precision: str | float | Precision = "lossless",
        writers: int = 2,
        max_pending_bytes: int | str = "1GiB",
        on_error: Literal["warn", "raise"] = "warn",
        read_only: bool = False,
        read_threads: int = 1,
        durability: Literal["rename", "fsync"] = "rename",
        memory: int | str | None = None,
        memory_dir: str | os.PathLike[str] | None = None,
        keep_memory: bool = False,
        copy_cache: bool = True,
        leaf_codecs: Iterable[LeafCodec] = (),
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise CacheConfigError(f"on_error={on_error!r} is neither 'warn' nor 'raise'")
        for name, threads in (("writers", writers), ("read_threads", read_threads)):
            if type(threads) is not int or threads < 1:
                raise CacheConfigError(f"{name}={threads!r} is not a positive integer")
        if durability not in ("rename", "fsync"):
            raise CacheConfigError(f"durability={durability!r} is neither 'rename' nor 'fsync'")
        if cache_dir is None and memory is None:
            raise CacheConfigError("cache_dir=None and memory=None leave no place to cache in: give one of them")
        self._memory = (
            None if memory is None else MemorySettings.parse(memory, memory_dir, keep=keep_memory, copy=copy_cache)
        )
        checked = BloscCodec(codec, clevel)
        self._settings = WriteSettings(
            checked.cname,
            checked.clevel,
            parse_chunks(chunks),
            Precision.parse(precision),
            durable=durability == "fsync",
        )
        self._store = None if cache_dir is None else Store(cache_dir)
        self._writers = writers
        self._read_threads = read_threads
        self._max_pending_bytes = parse_bytes(max_pending_bytes, "max_pending_bytes")
        self._on_error = on_error
        self._read_only = read_only
        self._leaf_codecs = tuple(leaf_codecs)
        self._counters = Counters()
        self._ram: RamTier | None = None
        self._reset()
        self._join_memory()

    def _join_memory(self) -> None:
        """Take part in the shared memory before any worker does, so that it outlives them all."""
        if self._ram is not None:
            self._ram.join()
            self._troubles.report()

    def _reset(self) -> None:
        self._troubles = Troubles(self._counters.is_first, raising=self._on_error == "raise")
        self._entries = None if self._store is None else OpenEntries(self._store, ReadThreads(self._read_threads))
        self._ram = (
            None
            if self._memory is None
            else RamTier(self._memory, self._counters, self._troubles, alone=self._store is None)
        )
        self._recorder = Recorder(
            self._store,
            self._entries,
            self._settings,
            self._counters,
            self._troubles,
            ram=self._ram,
            read_only=self._read_only,
            writers=self._writers,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._lookup = Lookup(self._store, self._entries, self._ram, self._recorder, self._counters, self._troubles)
        self._pid = os.getpid()  # last: another thread of a forked child takes the rest for its own from here on

    def __getstate__(self) -> dict[str, Any]:
        own = {"_entries", "_lookup", "_pid", "_ram", "_recorder", "_troubles"}
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ram = None
        self._reset()

    @property
    def cache_dir(self) -> Path | None:
        """Directory of the store; None if nothing is kept on disk."""
        return None if self._store is None else self._store.cache_dir

    @property
    def precision(self) -> Precision:
        """What non-integral floats may lose."""
        return self._settings.precision

    @property
    def stats(self) -> CacheStats:
        """Counts so far, those of worker processes included."""
        return self._counters.read()

    @overload
    def get(self, key: str) -> Any: ...
    @overload
    def get(self, key: str, default: D) -> Any | D: ...
    def get(self, key: str, default: Any = None) -> Any:
        """Return the item of a key, or `default` on a miss.

        What is returned belongs to the caller. An entry that is damaged, of another format or unreadable is a miss:
        counted, warned of once, and replaced by the next `put` of that key.

        Parameters
        ----------
        key : str
            32 lower-case hexadecimal digits.
        default : object
            What a miss returns.

        Returns
        -------
        object
            The item as `put` returned it: every type, shape and bit.

        Raises
        ------
        CacheWriteError, EntryDamagedError
            With ``on_error="raise"`` only.
        """
        return self.using(key, self.load, default)

    def using(self, key: str, read: Callable[[Entry], T], default: D) -> T | D:
        """Return what a function reads from an entry, or `default` on a miss.

        Parameters
        ----------
        key : str
            The entry.
        read : callable
            ``read(entry)``; called again with a fresh entry if the one that was open turned out to be replaced. An
            `EntryDamagedError`, OSError or MemoryError that it raises is a miss, as with `get`.
        default : object
            What a miss returns.

        Raises
        ------
        CacheWriteError, EntryDamagedError
            With ``on_error="raise"`` only.
        """
        self._notice_fork()
        return self._lookup.using(key, read, default)

    def load(self, entry: Entry) -> Any:
        """Return the whole item of an entry."""
        return self._decoded(entry.tree, entry.read)

    def get_region(self, key: str, name: str, region: Region) -> np.ndarray | None:
        """Return a box of one array of an entry, reading only the chunks that overlap it; None on a miss.

        An entry without such an array counts as damaged.

        Parameters
        ----------
        key : str
            The entry.
        name : str
            The array, as named in the entry.
        region : tuple of (int, int)
            Half-open (start, stop) per axis, in voxels, inside the array.

        Returns
        -------
        numpy.ndarray or None
            Of the extents of the region and the dtype of the array as it was put; C-contiguous, the caller's.

        Raises
        ------
        IndexError
            `region` does not lie inside the array.
        CacheWriteError, EntryDamagedError
            With ``on_error="raise"`` only.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as d, Cache(d) as cache:
        ...     _ = cache.put("0" * 32, {"image": np.arange(10000.0).reshape(100, 100)})
        ...     cache.get_region("0" * 32, "image", ((7, 8), (0, 3)))
        array([[700., 701., 702.]])
        """
        return self.using(key, lambda entry: entry.read(name, region), None)

    def put(
        self,
        key: str,
        item: Any,
        about: Json = None,
        *,
        owned: bool = False,
        query: Callable[[Json], VoxelQuery | None] | None = None,
        patch: tuple[int, ...] = (),
    ) -> Any:
        """Hand an item over to be written in the background; return it as `get` would.

        The item is copied before this returns, so the caller may do with it, and with what it gets back, what it likes.
        Arrays come back C-contiguous, tensors detached: a miss and a hit are the same.

        Parameters
        ----------
        key : str
            32 lower-case hexadecimal digits (see `zcache.keys`).
        item : object
            Any nesting of containers and leaves; not changed.
        about : Json, optional
            A dict for people who look at the entry later, such as its source and pipeline.
        owned : bool
            The caller gives the item up: what is returned may lie in its memory, which saves a copy.
        query : callable, optional
            ``query(tree)`` tells, from the payload tree, which sets of voxels to index (see `add_index`).
        patch : tuple of int
            Extents along the trailing axes of the patches that will mostly be read: guides the shape of chunks.

        Returns
        -------
        object
            What `get` will return; `item` itself if it cannot be stored.

        Raises
        ------
        CacheWriteError, UnstorableError
            With ``on_error="raise"`` only.
        """
        self._notice_fork()
        if not Store.is_key(key):
            raise ValueError(f"{key!r} is not a key: 32 lower-case hexadecimal digits")
        try:
            encoded = encode_item(item, self._leaf_codecs)
            wanted = query(encoded.tree) if query is not None else None
            pending = PendingItem.snapshot(encoded, self._settings.precision, about or {}, wanted, patch)
            result = self._decoded(pending.item.tree, pending.read_in(encoded) if owned else pending.read)
        except Exception as e:  # noqa: BLE001 - whatever a leaf does when it is copied, the item is returned
            self._trouble(skip_reason(e), f"item {key}", e)
            self._troubles.report()
            return item
        if self._read_only:
            self._counters.add(read_only=1)
        if not self._read_only or self._ram is not None:
            self._recorder.put(key, pending)
        self._troubles.report()
        return result

    def add_index(self, key: str, query: VoxelQuery) -> None:
        """Have sets of voxels of a published entry found in the background and added to it.

        The entry itself does not change. Nothing happens if it has them, is gone or damaged, if the cache is
        ``read_only``, or if it was tried in vain before; a failure is counted and reported as that of a write is.

        Parameters
        ----------
        key : str
            The entry.
        query : VoxelQuery
            Which sets.
        """
        self._notice_fork()
        if not self._read_only or self._ram is not None:
            self._recorder.add_index(key, query)
        self._troubles.report()

    def skip(self, reason: str, what: str = "", error: Exception | None = None) -> None:
        """Count an item that is not handed over, and report its error, if any.

        Parameters
        ----------
        reason : str
            One of `stats.SKIP_REASONS`.
        what : str
            What was not stored, for the warning.
        error : Exception, optional
            Why.
        """
        self._notice_fork()
        if error is None:
            self._counters.add(**{reason: 1})
        else:
            self._trouble(reason, what, error)
            self._troubles.report()

    def is_first(self, kind: str) -> bool:
        """Whether no process that uses this cache has asked this of the kind of message before."""
        return self._counters.is_first(kind)

    def about(self, key: str) -> Mapping[str, Json]:
        """Return what an entry on disk says of itself: source, pipeline, versions; nothing if it cannot be read."""
        if self._store is None:
            return {}
        try:
            return parse_entry(self._store.read_document(key)).about or {}
        except OSError:  # missing, or damaged: a read will say so
            return {}

    def count(self, **amounts: float) -> None:
        """Add to counters of `stats` that only the caller can keep."""
        self._counters.add(**amounts)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the entries on disk, or of those in memory if nothing is kept on disk."""
        self._notice_fork()
        if self._store is not None:
            return self._store.keys()
        return iter(()) if self._ram is None else self._ram.keys()

    def __contains__(self, key: str) -> bool:
        """Whether an item of this key is in memory, on disk or on the way there, be it damaged."""
        self._notice_fork()
        return self._lookup.has(key)

    def flush(self) -> None:
        """Wait until everything put so far in this process is written; report what could not be.

        Raises
        ------
        CacheWriteError
            With ``on_error="raise"`` only.
        """
        self._notice_fork()
        self._recorder.drain()
        self._troubles.report()

    def close(self) -> None:
        """Flush, remove this process's staging directory, and leave the memory that is shared with others.

        The last process to leave that memory removes what is in it. The cache may be used again afterwards.
        """
        self.flush()
        if self._store is not None:
            self._store.close()
        if self._entries is not None:
            self._entries.close()
        if self._ram is not None:
            self._ram.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # before a lock is touched: a thread of the parent may have held it
            self._reset()

    def _decoded(self, tree: Json, load: Callable[[str], np.ndarray]) -> Any:
        return decode_item(tree, load, self._leaf_codecs)

    def _trouble(self, reason: str, what: str, error: BaseException) -> None:
        self._counters.add(**{reason: 1})
        self._troubles.note(reason, f"{what} is not cached ({SKIP_REASONS[reason]})", error)
