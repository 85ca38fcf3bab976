"""What can go: planned first, from ages and sizes alone, then removed."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zcache.encoding.array_layout import shard_path
from zcache.encoding.layout import DOCUMENT
from zcache.encoding.payload import Json
from zcache.errors import CacheConfigError
from zcache.inspection.display import clean, json_time, size_text, source_text
from zcache.inspection.listing import EntryInfo
from zcache.inspection.stale import Sources, judge
from zcache.storage import files
from zcache.storage.store import Store

if TYPE_CHECKING:
    from zcache.inspection.view import CacheView

__all__ = ["Candidate", "Removal", "candidates", "plan", "remove"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that could go.

    Attributes
    ----------
    key : str
        The entry.
    created, used : datetime
        When it was written, and when an array of it was last read.
    stored_bytes : int
        What would be gained.
    source : str
        Names of the files that it was made from.
    stale : str
        Which of these was changed or is gone; empty if none is, or it is not known.
    """

    key: str
    created: dt.datetime
    used: dt.datetime
    stored_bytes: int
    source: str = ""
    stale: str = ""


@dataclass(frozen=True, slots=True)
class Removal:
    """An entry that goes, and why."""

    entry: Candidate
    reason: str

    def to_json(self) -> Json:
        """Return it as JSON."""
        entry = self.entry
        times = {"created": json_time(entry.created), "used": json_time(entry.used)}
        return {"key": entry.key, "reason": self.reason, "stored_bytes": entry.stored_bytes, **times}


def plan(
    entries: Sequence[Candidate],
    *,
    stale: bool = False,
    older_than: dt.datetime | None = None,
    unused_since: dt.datetime | None = None,
    max_size: int | None = None,
) -> list[Removal]:
    """Decide what goes. Nothing is read and nothing removed.

    Parameters
    ----------
    entries : sequence of Candidate
        What is there.
    stale : bool
        What has a source file that was changed or is gone goes.
    older_than : datetime
        What was written before goes.
    unused_since : datetime
        What was last read before goes.
    max_size : int
        Then those go that were not read for longest, until the others have so many bytes together.

    Examples
    --------
    >>> day = lambda n: dt.datetime(2026, 1, n, tzinfo=dt.UTC)
    >>> entries = [Candidate(key, day(1), day(n), 100) for key, n in (("a", 3), ("b", 2), ("c", 4))]
    >>> [(r.entry.key, r.reason) for r in plan(entries, max_size=250)]
    [('b', 'over 250 B, not read for longest')]
    """
    removals: list[Removal] = []
    kept = []
    for entry in entries:
        if stale and entry.stale:
            removals.append(Removal(entry, entry.stale))
        elif older_than is not None and entry.created < older_than:
            removals.append(Removal(entry, f"written {entry.created:%Y-%m-%d}"))
        elif unused_since is not None and entry.used < unused_since:
            removals.append(Removal(entry, f"last read {entry.used:%Y-%m-%d}"))
        else:
            kept.append(entry)
    if max_size is not None:
        left = sum(entry.stored_bytes for entry in kept)
        for entry in sorted(kept, key=lambda e: (e.used, e.created, e.key)):
            if left <= max_size:
                break
            left -= entry.stored_bytes
            removals.append(Removal(entry, f"over {size_text(max_size)}, not read for longest"))
    return removals


def candidates(view: CacheView, *, need_use: bool = False, sources: Sources | None = None) -> list[Candidate]:
    """Look up how old the sound entries of a cache are.

    What is damaged, foreign or of another format is no matter of age: see `zcache.inspection.verify`.

    Parameters
    ----------
    view : CacheView
        Which entries.
    need_use : bool
        The times of reading are going to matter.
    sources : Sources, optional
        Where to look whether source files were changed; left out, nobody looks.

    Raises
    ------
    CacheConfigError
        They matter, and the file system does not keep them.
    """
    if need_use and keeps_no_access_times(view.store):
        raise CacheConfigError(
            f"the file system of {view.path} is mounted with noatime: it does not say when entries were last read. "
            "Use --older-than, which goes by when they were written"
        )
    found = (_candidate(view.store, info, sources) for info in view.infos if info.status == "ok")
    return [candidate for candidate in found if candidate is not None]


def keeps_no_access_times(store: Store) -> bool:
    """Whether the file system is mounted so that it does not note when files are read."""
    noatime = getattr(os, "ST_NOATIME", 0)
    return bool(noatime and os.statvfs(store.root).f_flag & noatime)


def remove(store: Store, key: str) -> None:
    """Remove an entry in one step; who has it open can read on.

    Raises
    ------
    OSError
        The file system refuses.
    """
    store.remove(key)


def _candidate(store: Store, info: EntryInfo, sources: Sources | None) -> Candidate | None:
    path = store.entry_path(info.key)
    # Lists read the documents, training the shards: only the latter say something about use.
    read = [path / array.path / shard_path(len(array.chunk_shape)) for array in info.arrays] or [path / DOCUMENT]
    try:
        written = files.modified_s(path / DOCUMENT)
        used = max(files.accessed_s(file) for file in read)
    except OSError:  # gone, or unreadable
        return None
    created = info.created or _moment(written)
    fresh = None if sources is None else judge(info.stamps, sources.look)
    stale = "; ".join(map(clean, fresh.reasons)) if fresh is not None and fresh.status == "stale" else ""
    return Candidate(info.key, created, max(_moment(used), created), info.stored_bytes, source_text(info), stale)


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
