"""A cache in numbers: how much of what, made by which pipelines."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcache.encoding.payload import Json
from zcache.inspection import display
from zcache.inspection.listing import EntryInfo
from zcache.inspection.pipelines import Pipeline, difference

__all__ = ["ArrayGroup", "Summary", "summarise"]


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """The arrays of one name that are stored in the same way.

    Attributes
    ----------
    name, dtype, stored_dtype, narrowing : str
        As of `ArrayInfo`.
    count : int
        How many.
    raw_bytes, stored_bytes : int
        Together, in memory and on disk.
    max_abs_error : float
        The largest of them.
    """

    name: str
    dtype: str
    stored_dtype: str
    narrowing: str
    count: int
    raw_bytes: int
    stored_bytes: int
    max_abs_error: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A cache in numbers; prints as text, and as HTML in notebooks.

    Attributes
    ----------
    path : Path
        The cache directory.
    problem : str
        What is wrong with the store as a whole; empty if nothing.
    counts : dict of str to int
        Entries by status.
    raw_bytes, stored_bytes, index_bytes : int
        In memory, on disk, and those of the latter that are indexes of voxels.
    oldest, newest : datetime or None
        When entries were written.
    pipelines : tuple of (Pipeline, int)
        With the number of their entries, the most first.
    arrays : tuple of ArrayGroup
        The most bytes first.
    foreign : tuple of str
        What lies among the entries and is none.
    """

    path: Path
    problem: str
    counts: dict[str, int]
    raw_bytes: int
    stored_bytes: int
    index_bytes: int
    oldest: dt.datetime | None
    newest: dt.datetime | None
    pipelines: tuple[tuple[Pipeline, int], ...]
    arrays: tuple[ArrayGroup, ...]
    foreign: tuple[str, ...]

    @property
    def n_entries(self) -> int:
        """Number of entries, sound or not."""
        return sum(self.counts.values())

    @property
    def ratio(self) -> float:
        """How many times smaller the entries are on disk; NaN if there are none."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else math.nan

    def differences(self) -> dict[str, list[str]]:
        """Return what tells each pipeline from the first, by their letters."""
        return {
            display.letter(i): difference(self.pipelines[0][0], pipeline)
            for i, (pipeline, _) in enumerate(self.pipelines)
            if i
        }

    def to_json(self) -> Json:
        """Return all of it as JSON."""
        return {
            "path": str(self.path),
            "problem": self.problem,
            "entries": self.n_entries,
            "counts": self.counts,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "index_bytes": self.index_bytes,
            "ratio": display.json_number(self.ratio),
            "oldest": display.json_time(self.oldest),
            "newest": display.json_time(self.newest),
            "pipelines": [
                {"name": display.letter(i), "entries": n, "steps": pipeline.to_json()}
                for i, (pipeline, n) in enumerate(self.pipelines)
            ],
            "differences": self.differences(),
            "arrays": [
                {name: display.json_number(getattr(group, name)) for name in ArrayGroup.__slots__}
                for group in self.arrays
            ],
            "foreign": list(self.foreign),
        }

    def __str__(self) -> str:
        return display.summary_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return display.summary_html(self)

    def __rich__(self) -> Any:
        from zcache.inspection import rich_tables  # noqa: PLC0415 - rich takes longer to import than all of this

        return rich_tables.summary(self)


def summarise(path: Path, infos: Sequence[EntryInfo], foreign: tuple[str, ...], problem: str) -> Summary:
    """Count what is in a cache."""
    created = [info.created for info in infos if info.created is not None]
    return Summary(
        path=path,
        problem=problem,
        counts=dict(sorted(Counter(info.status for info in infos).items())),
        raw_bytes=sum(info.raw_bytes for info in infos),
        stored_bytes=sum(info.stored_bytes for info in infos),
        index_bytes=sum(index.stored_bytes for info in infos for index in info.indexes),
        oldest=min(created, default=None),
        newest=max(created, default=None),
        pipelines=pipelines_of(infos),
        arrays=_groups(infos),
        foreign=foreign,
    )


def pipelines_of(infos: Sequence[EntryInfo]) -> tuple[tuple[Pipeline, int], ...]:
    """Return the pipelines that made some entries with how many each, the most first."""
    by_id = {id(info.pipeline): info.pipeline for info in infos if info.pipeline is not None}
    counted = Counter(id(info.pipeline) for info in infos if info.pipeline is not None)
    return tuple((by_id[which], n) for which, n in counted.most_common())


def _groups(infos: Sequence[EntryInfo]) -> tuple[ArrayGroup, ...]:
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for info in infos:
        for array in info.arrays:
            totals = found.setdefault((array.name, array.dtype, array.stored_dtype, array.narrowing), [0, 0, 0, 0.0])
            totals[0] += 1
            totals[1] += array.raw_bytes
            totals[2] += array.stored_bytes
            totals[3] = max(totals[3], array.max_abs_error)
    groups = (
        ArrayGroup(*which, int(count), int(raw), int(stored), error)
        for which, (count, raw, stored, error) in found.items()
    )
    return tuple(sorted(groups, key=lambda group: -group.stored_bytes))
