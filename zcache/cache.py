"""The cache: get an item, put an item, flush; a shared store on disk that never stops the program using it."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, overload

import numpy as np

from zcache.encoding.chunking import Region, parse_chunks
from zcache.encoding.hint import precision_hint
from zcache.encoding.narrowing import LOSSLESS, Precision
from zcache.encoding.payload import EncodedItem, Json, LeafCodec, decode_item, encode_item
from zcache.encoding.shard import BloscCodec
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import CacheConfigError, EntryDamagedError
from zcache.keys import canonical_json
from zcache.stats import SKIP_REASONS, CacheStats, Counters
from zcache.storage.entry import Entry, OpenEntries, StoredEntry
from zcache.storage.pending import PendingItem
from zcache.storage.pool import WriterPool
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads
from zcache.storage.voxels import add_sets
from zcache.storage.writer import WriteSettings, Written, write_entry
from zcache.troubles import Troubles, skip_reason

__all__ = ["Cache", "parse_bytes"]

D = TypeVar("D")
T = TypeVar("T")

_log = logging.getLogger("zcache")

_HINT_MIN_BYTES: Final = 1024 * 1024
_INDEX_BYTES_PER_VOXEL: Final = 6  # a label of one byte, an image of four, the bits
# Something else bears the name: a link, a directory, a socket or a device.
_FOREIGN: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
        self._pool: WriterPool[PendingItem | _IndexJob] = WriterPool(
            self._work,
            self._work_failed,
            writers=self._writers,
            max_pending_bytes=self._max_pending_bytes,
            at_rest=self._at_rest,
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._troubles = Troubles(self._counters.is_first, raising=self._on_error == "raise")
        self._damaged: set[str] = set()
        self._not_indexed: set[str] = set()
        self._entries = self._none_open()

    def _none_open(self) -> OpenEntries:
        return OpenEntries(self._store, ReadThreads(self._read_threads))

    def __getstate__(self) -> dict[str, Any]:
        own = {"_pool", "_entries", "_pid", "_lock", "_troubles", "_damaged", "_not_indexed"}
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
        pending = self._pool.pending(key)
        if isinstance(pending, PendingItem):
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
            waited_s = self._pool.submit(key, pending, pending.nbytes)
            self._counters.add(wait_s=waited_s)
        self._troubles.report()
        return result

    def add_index(self, key: str, query: VoxelQuery) -> None:
        """Have sets of voxels of a published entry found in the background and added to it.

        The entry itself does not change. Nothing happens if it has them, is gone or damaged, if the cache is
        ``read_only``, or if it was tried in vain before; a failure is counted and reported as that of a write is.
        """
        self._notice_fork()
        job = _IndexJob(key, query)
        if self._read_only or job.name in self._not_indexed:
            return
        self._counters.add(wait_s=self._pool.submit(job.name, job, job.nbytes))
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
        self._pool.drain()
        self._troubles.report()

    def close(self) -> None:
        """Flush, and remove this process's staging directory. The cache may be used again afterwards."""
        self.flush()
        self._store.close()
        self._entries = self._none_open()

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
            self._mark_damaged(key)
            self._counters.add(damaged=1)
            self._troubles.note("damaged", f"the entry {path} is damaged and is recomputed", error)
            return
        if getattr(error, "errno", 0) in _FOREIGN:
            self._mark_damaged(key)
        self._counters.add(read_errors=1)
        self._troubles.note("read_errors", f"the entry {path} cannot be read and is recomputed", error)

    def _mark_damaged(self, key: str) -> None:
        with self._lock:
            self._damaged.add(key)

    def _work(self, key: str, job: PendingItem | _IndexJob) -> None:
        """Do one job of the pool, on its thread."""
        if isinstance(job, PendingItem):
            self._write(key, job)
            return
        try:
            entry, _ = self._entries.open(job.key)
            self._index(job.key, entry, job.query, entry.read)
        except (FileNotFoundError, EntryDamagedError):
            self._entries.forget(job.key)  # the next read finds out, and has the entry recomputed

    def _index(self, key: str, entry: StoredEntry, query: VoxelQuery, read: Callable[[str], np.ndarray]) -> None:
        stored_bytes = add_sets(self._store, key, entry, query, self._settings, read)
        if stored_bytes:
            self._counters.add(indexed=1, stored_bytes=stored_bytes)

    def _write(self, key: str, pending: PendingItem) -> None:
        """Write one entry."""
        with self._lock:
            is_damaged = key in self._damaged
        written = write_entry(
            self._store,
            key,
            pending.item,
            replace(self._settings, patch=pending.patch),
            pending.about,
            narrowings=pending.narrowings,
            replace=is_damaged,
        )
        with self._lock:
            self._damaged.discard(key)
        self._entries.forget(key)
        self._hint(pending.item, written)
        if not written.published:
            self._counters.add(already_stored=1)
            return
        self._counters.add(stored=1, raw_bytes=written.raw_bytes, stored_bytes=written.stored_bytes)
        if pending.query is not None:
            job = _IndexJob(key, pending.query)
            try:
                self._index(key, self._entries.open(key)[0], pending.query, pending.peek)
            except Exception as e:  # noqa: BLE001 - the boundary of the pool: the entry is written, only the index not
                self._work_failed(job.name, job, e)

    def _hint(self, item: EncodedItem, written: Written) -> None:
        """Say once, with the first entry, what `precision` would save if an image had to stay floating point."""
        if self._settings.precision != LOSSLESS or not _log.isEnabledFor(logging.INFO) or self.stats.stored:
            return
        for leaf in item.leaves:
            record = written.records[leaf.name]
            if record.dtype.kind == "f" and leaf.array.nbytes >= _HINT_MIN_BYTES:
                _log.info(precision_hint(leaf.name, leaf.array, record.grid, record.codec, record.shard_nbytes))
                return

    def _at_rest(self, exiting: bool) -> None:
        self._store.close()
        if exiting:
            self._troubles.report()

    def _work_failed(self, key: str, job: PendingItem | _IndexJob, error: Exception) -> None:
        if isinstance(job, PendingItem):
            self._trouble(skip_reason(error), f"the entry {self._store.entry_path(key)}", error)
            return
        with self._lock:
            self._not_indexed.add(job.name)
        self._counters.add(not_indexed=1)
        what = f"the voxels that crops of {self._store.entry_path(job.key)} choose from cannot be indexed"
        self._troubles.note("not_indexed", f"{what}; label and image are read whole", error)

    def _trouble(self, reason: str, what: str, error: BaseException) -> None:
        self._counters.add(**{reason: 1})
        self._troubles.note(reason, f"{what} is not cached ({SKIP_REASONS[reason]})", error)


@dataclass(frozen=True, slots=True)
class _IndexJob:
    """Sets of voxels to be found in an entry that is on disk."""

    key: str
    query: VoxelQuery

    @property
    def name(self) -> str:
        """Name of the job: no key of an entry."""
        return f"{self.key} {canonical_json(self.query.what)}"

    @property
    def nbytes(self) -> int:
        """Memory of the job, roughly: the arrays that it reads, and the indices that it finds at a time."""
        return _INDEX_BYTES_PER_VOXEL * self.query.n_voxels


def parse_bytes(value: int | str, name: str = "value") -> int:
    """Read a number of bytes such as ``2_000_000``, ``"512MiB"`` or ``"1.5 GB"`` (units are powers of 1024).

    Raises
    ------
    CacheConfigError
        Not a positive number of bytes.

    Examples
    --------
    >>> parse_bytes("1GiB")
    1073741824
    """
    number: float = 0.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        if match is not None:
            number = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number < 1:
        raise CacheConfigError(f"{name}={value!r} is not a number of bytes such as 1073741824 or '1GiB'")
    return int(number)
