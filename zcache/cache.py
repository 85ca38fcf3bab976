"""The cache: get an item, put an item, flush; a shared store on disk that never stops the program using it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, overload

import numpy as np

from zcache.encoding.chunking import Region, parse_chunks
from zcache.encoding.narrowing import Precision
from zcache.encoding.payload import Json, LeafCodec, decode_item, encode_item
from zcache.encoding.shard import BloscCodec
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import CacheConfigError, EntryDamagedError
from zcache.stats import SKIP_REASONS, CacheStats, Counters
from zcache.storage.entry import Entry, OpenEntries
from zcache.storage.pending import PendingItem
from zcache.storage.recorder import Recorder
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads
from zcache.storage.writer import WriteSettings
from zcache.troubles import Troubles, skip_reason
from zcache.units import parse_bytes

__all__ = ["Cache"]

D = TypeVar("D")
T = TypeVar("T")


# Something else bears the name: a link, a directory, a socket or a device.
_FOREIGN: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})


class Cache:
    """A store of items by key, filled in the background.

    The torch-free heart of `zcache.PersistentDataset`: safe in threads, in forked and spawned processes, and between
    hosts that share the directory.

    Parameters
    ----------
    cache_dir : path
        Directory of the store; made when the first item is written.
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
        cache_dir: str | os.PathLike[str],
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
        leaf_codecs: Iterable[LeafCodec] = (),
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise CacheConfigError(f"on_error={on_error!r} is neither 'warn' nor 'raise'")
        for name, threads in (("writers", writers), ("read_threads", read_threads)):
            if type(threads) is not int or threads < 1:
                raise CacheConfigError(f"{name}={threads!r} is not a positive integer")
        if durability not in ("rename", "fsync"):
            raise CacheConfigError(f"durability={durability!r} is neither 'rename' nor 'fsync'")
        checked = BloscCodec(codec, clevel)
        self._settings = WriteSettings(
            checked.cname,
            checked.clevel,
            parse_chunks(chunks),
            Precision.parse(precision),
            durable=durability == "fsync",
        )
        self._store = Store(cache_dir)
        self._writers = writers
        self._read_threads = read_threads
        self._max_pending_bytes = parse_bytes(max_pending_bytes, "max_pending_bytes")
        self._on_error = on_error
        self._read_only = read_only
        self._leaf_codecs = tuple(leaf_codecs)
        self._counters = Counters()
        self._reset()

    def _reset(self) -> None:
        self._troubles = Troubles(self._counters.is_first, raising=self._on_error == "raise")
        self._entries = OpenEntries(self._store, ReadThreads(self._read_threads))
        self._recorder = Recorder(
            self._store,
            self._entries,
            self._settings,
            self._counters,
            self._troubles,
            writers=self._writers,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._pid = os.getpid()  # last: another thread of a forked child takes the rest for its own from here on

    def __getstate__(self) -> dict[str, Any]:
        own = {"_entries", "_pid", "_recorder", "_troubles"}
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def cache_dir(self) -> Path:
        """Directory of the store."""
        return self._store.cache_dir

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
        self._troubles.report()
        pending = self._recorder.pending(key)
        if pending is not None:
            found = read(pending)
            self._counters.add(inflight_hits=1)
            return found
        return self._attempt(key, read, default)

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

        Raises
        ------
        IndexError
            `region` does not lie inside the array.
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

        Raises
        ------
        CacheWriteError, UnstorableError
            With ``on_error="raise"`` only.
        """
        self._notice_fork()
        self._store.entry_path(key)  # a malformed key is the caller's mistake, not the disk's
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
        else:
            self._recorder.put(key, pending)
        self._troubles.report()
        return result

    def add_index(self, key: str, query: VoxelQuery) -> None:
        """Have sets of voxels of a published entry found in the background and added to it.

        The entry itself does not change. Nothing happens if it has them, is gone or damaged, if the cache is
        ``read_only``, or if it was tried in vain before; a failure is counted and reported as that of a write is.
        """
        self._notice_fork()
        if not self._read_only:
            self._recorder.add_index(key, query)
        self._troubles.report()

    def skip(self, reason: str, what: str = "", error: Exception | None = None) -> None:
        """Count an item that is not handed over, for one of `stats.SKIP_REASONS`, and report its error, if any."""
        self._notice_fork()
        if error is None:
            self._counters.add(**{reason: 1})
        else:
            self._trouble(reason, what, error)
            self._troubles.report()

    def count(self, **amounts: float) -> None:
        """Add to counters of `stats` that only the caller can keep."""
        self._counters.add(**amounts)

    def keys(self) -> Iterator[str]:
        """Yield the keys of the published entries."""
        return self._store.keys()

    def flush(self) -> None:
        """Wait until everything put so far in this process is written; report what could not be."""
        self._notice_fork()
        self._recorder.drain()
        self._troubles.report()

    def close(self) -> None:
        """Flush, and remove this process's staging directory. The cache may be used again afterwards."""
        self.flush()
        self._store.close()
        self._entries.close()

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

    def _attempt(self, key: str, read: Callable[[Entry], T], default: D) -> T | D:
        """Open an entry and read from it; what can go wrong with an entry is a miss."""
        kept = False
        try:
            entry, kept = self._entries.open(key)
            found = read(entry)
        except FileNotFoundError:
            self._entries.forget(key)  # never written, or removed by somebody meanwhile
        except (EntryDamagedError, OSError, MemoryError) as e:
            self._entries.forget(key)
            if kept:  # another process may have replaced it since it was opened
                return self._attempt(key, read, default)
            self._cannot_read(key, e)
        else:
            self._counters.add(hits=1)
            return found
        self._counters.add(misses=1)
        self._troubles.report()
        return default

    def _cannot_read(self, key: str, error: Exception) -> None:
        path = self._store.entry_path(key)
        if isinstance(error, EntryDamagedError):
            self._recorder.mark_damaged(key)
            self._counters.add(damaged=1)
            self._troubles.note("damaged", f"the entry {path} is damaged and is recomputed", error)
            return
        if getattr(error, "errno", 0) in _FOREIGN:
            self._recorder.mark_damaged(key)
        self._counters.add(read_errors=1)
        self._troubles.note("read_errors", f"the entry {path} cannot be read and is recomputed", error)

    def _trouble(self, reason: str, what: str, error: BaseException) -> None:
        self._counters.add(**{reason: 1})
        self._troubles.note(reason, f"{what} is not cached ({SKIP_REASONS[reason]})", error)
