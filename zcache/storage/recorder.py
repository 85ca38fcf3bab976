"""What happens to items in the background: they are written, indexed, and what went wrong is counted and reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from zcache.encoding.hint import precision_hint
from zcache.encoding.narrowing import LOSSLESS
from zcache.encoding.payload import EncodedItem
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import EntryDamagedError
from zcache.keys import canonical_json
from zcache.stats import SKIP_REASONS, Counters
from zcache.storage.entry import OpenEntries, StoredEntry
from zcache.storage.pending import PendingItem
from zcache.storage.pool import WriterPool
from zcache.storage.ram import RamTier
from zcache.storage.store import Store
from zcache.storage.voxels import add_sets, find_sets
from zcache.storage.writer import WriteSettings, Written, write_entry
from zcache.troubles import Troubles, skip_reason

__all__ = ["Recorder"]

_log = logging.getLogger("zcache")

_HINT_MIN_BYTES: Final = 1024 * 1024
_INDEX_BYTES_PER_VOXEL: Final = 6  # a label of one byte, an image of four, the bits


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


class Recorder:
    """Writes items and indexes of one process on the threads of a pool.

    Parameters
    ----------
    store, entries, settings
        Where entries lie on disk, those that are open, and how new ones are encoded; no store: nothing is on disk.
    ram : RamTier or None
        Where items lie in memory.
    read_only : bool
        Write nothing to the store.
    counters, troubles
        Who is told of what happens.
    writers, max_pending_bytes
        Of the pool.
    """

    def __init__(
        self,
        store: Store | None,
        entries: OpenEntries | None,
        settings: WriteSettings,
        counters: Counters,
        troubles: Troubles,
        *,
        ram: RamTier | None,
        read_only: bool,
        writers: int,
        max_pending_bytes: int,
    ) -> None:
        self._disk = None if store is None or entries is None or read_only else (store, entries)
        self._store = store
        self._ram = ram
        self._settings = settings
        self._counters = counters
        self._troubles = troubles
        self._lock = threading.Lock()
        self._damaged: set[str] = set()
        self._not_indexed: set[str] = set()
        self._pool: WriterPool[PendingItem | _IndexJob] = WriterPool(
            self._work, self._failed, writers=writers, max_pending_bytes=max_pending_bytes, at_rest=self._at_rest
        )

    def pending(self, key: str) -> PendingItem | None:
        """Return the item of a key that is not written yet, if there is one."""
        job = self._pool.pending(key)
        return job if isinstance(job, PendingItem) else None

    def put(self, key: str, item: PendingItem) -> None:
        """Have an item written; wait while those before it fill the memory allowed."""
        self._counters.add(wait_s=self._pool.submit(key, item, item.nbytes))

    def add_index(self, key: str, query: VoxelQuery) -> None:
        """Have sets of voxels found and added to a published entry, unless that was tried in vain before."""
        job = _IndexJob(key, query)
        if job.name not in self._not_indexed:
            self._counters.add(wait_s=self._pool.submit(job.name, job, job.nbytes))

    def drain(self) -> None:
        """Wait until everything that was handed over so far is done."""
        self._pool.drain()

    def mark_damaged(self, key: str) -> None:
        """Have the next item of a key take the place of the entry that is there."""
        with self._lock:
            self._damaged.add(key)

    def _work(self, key: str, job: PendingItem | _IndexJob) -> None:
        """Do one job of the pool, on its thread."""
        if isinstance(job, PendingItem):
            self._write(key, job)
            return
        self._index(job.key, job.query)

    def _index(self, key: str, query: VoxelQuery, read: Callable[[str], np.ndarray] | None = None) -> None:
        """Add an index to an item, wherever it is."""
        found: list[EncodedItem] = []

        def find(read: Callable[[str], np.ndarray]) -> EncodedItem:
            if not found:
                found.append(find_sets(query, read))
            return found[0]

        if self._ram is not None and not self._ram.has_sets(key, query.what):
            held = self._ram.open(key, lambda: None)
            if held is not None:
                self._ram.add_sets(key, query.what, find(read or held.read))
        if self._disk is not None:
            self._index_on_disk(*self._disk, key, query, lambda entry: find(read or entry.read))

    def _index_on_disk(
        self,
        store: Store,
        entries: OpenEntries,
        key: str,
        query: VoxelQuery,
        find: Callable[[StoredEntry], EncodedItem],
    ) -> None:
        """Add an index to an entry; one that is gone or damaged is left to the next read, which has it recomputed."""
        try:
            entry, _ = entries.open(key)
        except (FileNotFoundError, EntryDamagedError):
            return
        try:
            stored_bytes = add_sets(store, key, entry, query, self._settings, lambda: find(entry))
        except EntryDamagedError:
            entries.forget(key)
            return
        if stored_bytes:
            self._counters.add(indexed=1, stored_bytes=stored_bytes)

    def _write(self, key: str, pending: PendingItem) -> None:
        """Put an item where it belongs: into memory first, whence the next reader has it, then on disk."""
        item = pending
        if self._ram is not None:
            item = pending.narrowed()
            self._ram.fill(key, item.item, item.narrowings)
        stored = self._disk is None or self._write_to_disk(*self._disk, key, item)
        if pending.query is not None and stored:
            job = _IndexJob(key, pending.query)
            try:
                self._index(key, pending.query, pending.peek)
            except Exception as e:  # noqa: BLE001 - the boundary of the pool: the item is written, only the index not
                self._failed(job.name, job, e)

    def _write_to_disk(self, store: Store, entries: OpenEntries, key: str, pending: PendingItem) -> bool:
        """Write one entry; whether it was the first."""
        with self._lock:
            is_damaged = key in self._damaged
        written = write_entry(
            store,
            key,
            pending.item,
            replace(self._settings, patch=pending.patch),
            pending.about,
            narrowings=pending.narrowings,
            replace=is_damaged,
        )
        with self._lock:
            self._damaged.discard(key)
        entries.forget(key)
        self._hint(pending.item, written)
        if not written.published:
            self._counters.add(already_stored=1)
            return False
        self._counters.add(stored=1, raw_bytes=written.raw_bytes, stored_bytes=written.stored_bytes)
        return True

    def _hint(self, item: EncodedItem, written: Written) -> None:
        """Say once, with the first entry, what `precision` would save if an image had to stay floating point."""
        if self._settings.precision != LOSSLESS or not _log.isEnabledFor(logging.INFO) or self._counters.read().stored:
            return
        for leaf in item.leaves:
            record = written.records[leaf.name]
            if record.dtype.kind == "f" and leaf.array.nbytes >= _HINT_MIN_BYTES:
                _log.info(precision_hint(leaf.name, leaf.array, record.grid, record.codec, record.shard_nbytes))
                return

    def _at_rest(self, exiting: bool) -> None:
        if self._store is not None:
            self._store.close()
        if exiting:
            self._troubles.report()

    def _failed(self, key: str, job: PendingItem | _IndexJob, error: Exception) -> None:
        if isinstance(job, PendingItem):
            self._cannot_write(key, error)
            return
        with self._lock:
            self._not_indexed.add(job.name)
        self._counters.add(not_indexed=1)
        what = f"the voxels that crops of {self._place(job.key)} choose from cannot be indexed"
        self._troubles.note("not_indexed", f"{what}; label and image are read whole", error)

    def _cannot_write(self, key: str, error: Exception) -> None:
        reason = skip_reason(error)
        self._counters.add(**{reason: 1})
        what = f"the entry {self._place(key)} is not cached ({SKIP_REASONS[reason]})"
        self._troubles.note(reason, what, error)

    def _place(self, key: str) -> str:
        return key if self._store is None else str(self._store.entry_path(key))
