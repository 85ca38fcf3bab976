"""A cache, opened to be looked at: read-only, without torch and MONAI, whoever writes to it meanwhile."""

from __future__ import annotations

import datetime as dt
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcache.encoding.layout import DOCUMENT, FORMAT, MAX_DOCUMENT_BYTES
from zcache.errors import CacheConfigError, EntryNotFoundError
from zcache.inspection import display, extras
from zcache.inspection.entry import EntryView, Opened
from zcache.inspection.listing import EntryInfo, Status, format_of
from zcache.inspection.moments import parse_moment
from zcache.inspection.pipelines import Pipeline
from zcache.inspection.summary import Summary, summarise
from zcache.storage import files
from zcache.storage.store import Store

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CacheView", "EntryView", "open_cache"]

_CLOSE = 3  # similar names that an error message lists
_SIMILAR = 0.5
# Values that do not stand in the document as one reads them.
_ENCODED = ('"$npscalar"', '"$int"')

When = dt.datetime | dt.date | dt.timedelta | str
"""A moment: a date, an ISO string, an age such as ``"30d"`` or a timedelta, counted back from now."""


def open_cache(path: str | os.PathLike[str]) -> CacheView:
    """Open a cache to look at it. Never writes.

    Parameters
    ----------
    path : path
        The directory that was given as ``cache_dir``, or the ``cache.zarr`` in it.

    Returns
    -------
    CacheView
        A mapping of keys to entries.

    Raises
    ------
    CacheConfigError
        There is no cache; the message says where one could be.

    Examples
    --------
    >>> import tempfile, numpy as np, zcache
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with zcache.Cache(d) as cache:
    ...         _ = cache.put("0" * 32, {"image": np.zeros((1, 64, 64)), "patient": "P017"})
    ...     view = zcache.open_cache(d)
    ...     [entry] = view.find("p017").values()
    ...     entry.read("image").shape, entry.load()["patient"], entry.info.arrays[0].ratio > 100
    ((1, 64, 64), 'P017', True)
    """
    directory = Path(path)
    if directory.name == "cache.zarr" and not (directory / "cache.zarr").is_dir():
        directory = directory.absolute().parent
    store = Store(directory)
    try:
        if not files.is_directory(store.root):
            raise CacheConfigError(_no_cache(Path(path)))
        names = [name for name, _ in files.list_directory(store.root)]
    except OSError as e:
        raise CacheConfigError(f"the cache {directory} cannot be read: {e.strerror or e}") from e
    keys = sorted(name for name in names if store.is_key(name))
    foreign = sorted(name for name in names if not store.is_key(name) and name != DOCUMENT)
    return CacheView(Opened(store, tuple(foreign)), keys)


class CacheView(Mapping[str, EntryView]):
    """The entries of a cache by their keys, or some of them. Made by `open_cache`.

    The keys are those of the moment when it was opened. Entries that are removed meanwhile are left out of what is
    listed; to find new ones, open it again.
    """

    def __init__(self, opened: Opened, keys: Iterable[str]) -> None:
        self._opened = opened
        self._keys = dict.fromkeys(keys)

    @property
    def path(self) -> Path:
        """The cache directory."""
        return self._opened.store.cache_dir

    @property
    def store(self) -> Store:
        """The files."""
        return self._opened.store

    @property
    def foreign(self) -> tuple[str, ...]:
        """What lies among the entries and is none."""
        return self._opened.foreign

    @property
    def problem(self) -> str:
        """What is wrong with the store as a whole; empty if nothing."""
        try:
            data = files.read_below(self.store.root, [DOCUMENT], MAX_DOCUMENT_BYTES)
        except FileNotFoundError:
            return f"it has no {DOCUMENT}: Zarr tools cannot open it" if self._keys else ""
        except OSError as e:
            return f"its {DOCUMENT} cannot be read: {e.strerror or e}"
        version = format_of(data)
        return "" if version is None else f"it has format {version}; this zcache reads format {FORMAT}"

    @property
    def infos(self) -> list[EntryInfo]:
        """What a list shows of each entry that is still there, in the order of the keys."""
        return [info for info in self._opened.look_up(list(self._keys)) if info.status != "gone"]

    def find(self, text: str) -> CacheView:
        """Return the entries that have a text anywhere in the path of a source file or in a value, in whatever case.

        Keys that begin with it count too.
        """
        return self._some(key for key in self._keys if self._mentions(key, text.casefold()))

    def filter(
        self,
        *,
        transform: str | None = None,
        since: When | None = None,
        before: When | None = None,
        min_bytes: int | None = None,
        max_bytes: int | None = None,
        status: Status | None = None,
    ) -> CacheView:
        """Return the entries that fit all conditions.

        Parameters
        ----------
        transform : str
            A transform whose name contains this, or whose text does, such as ``"pixdim=[1.0"``.
        since, before : datetime, date, timedelta or str
            When it was written: a moment, or an age such as ``"30d"``.
        min_bytes, max_bytes : int
            Size on disk.
        status : str
            Such as ``"damaged"``.
        """
        now = dt.datetime.now(dt.UTC)
        start = None if since is None else parse_moment(since, now, "since")
        end = None if before is None else parse_moment(before, now, "before")

        def fits(info: EntryInfo) -> bool:
            return (
                (transform is None or _has_step(info.pipeline, transform))
                and (start is None or (info.created is not None and info.created >= start))
                and (end is None or (info.created is not None and info.created < end))
                and (min_bytes is None or info.stored_bytes >= min_bytes)
                and (max_bytes is None or info.stored_bytes <= max_bytes)
                and (status is None or info.status == status)
            )

        return self._some(info.key for info in self.infos if fits(info))

    def resolve(self, text: str) -> EntryView:
        """Return the one entry that a text means: a key, the beginning of a key, or a part of a source or value.

        Raises
        ------
        EntryNotFoundError
            There is none, or several; the message lists what comes close.
        """
        if text in self._keys:
            return self[text]
        found = [key for key in self._keys if key.startswith(text.lower())] if text else list(self._keys)
        if not found:
            found = list(self.find(text))
        if len(found) == 1:
            return self[found[0]]
        if found:
            raise EntryNotFoundError(f"{text!r} means {len(found)} entries: {self._named(found)}")
        raise EntryNotFoundError(f"no entry of {self.path} is called {text!r} or mentions it{self._similar(text)}")

    def summary(self) -> Summary:
        """Return what there is in numbers, by pipelines and by arrays."""
        return summarise(self.path, self.infos, self.foreign, self.problem)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row for each array (one row for an entry that has none).

        Raises
        ------
        MissingExtraError
            Pandas is not installed.
        """
        pandas = extras.module("pandas")
        columns, rows = display.dataframe_rows(self.infos)
        return pandas.DataFrame(rows, columns=columns)

    def __getitem__(self, key: str) -> EntryView:
        if key not in self._keys:
            raise EntryNotFoundError(f"no entry of {self.path} is called {key!r}{self._similar(str(key))}")
        return EntryView(self._opened, key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return display.cache_text(self)

    def _repr_html_(self) -> str:
        return display.cache_html(self)

    def __rich__(self) -> Any:
        from zcache.inspection import rich_tables  # noqa: PLC0415 - rich takes longer to import than all of this

        return rich_tables.cache(self)

    def _some(self, keys: Iterable[str]) -> CacheView:
        return CacheView(self._opened, list(keys))

    def _mentions(self, key: str, text: str) -> bool:
        info = self._opened.info(key)
        if info.status == "gone":
            return False
        if key.startswith(text) or any(text in source.casefold() for source in info.source):
            return True
        try:
            document = self.store.read_document(key).decode("ascii", "replace")
            if json.dumps(text)[1:-1] not in document.lower() and not any(tag in document for tag in _ENCODED):
                return False  # most entries: nothing need be parsed
            return any(text in value.casefold() for value in self[key].scalars.values())
        except OSError:  # damaged, unreadable or gone: only what the list says of it can be found
            return False

    def _named(self, keys: Sequence[str]) -> str:
        infos = [self._opened.info(key) for key in keys[:_CLOSE]]
        by = display.letters(self.infos) if len({id(info.pipeline) for info in infos}) > 1 else {}
        made = [f", by pipeline {by[id(info.pipeline)]}" if id(info.pipeline) in by else "" for info in infos]
        named = [f"{i.key[:12]} ({display.source_text(i)}{which})" for i, which in zip(infos, made, strict=True)]
        return ", ".join(named) + (", …" if len(keys) > _CLOSE else "")

    def _similar(self, text: str) -> str:
        names = {key: key for key in self._keys}
        for info in self.infos:
            names |= {Path(source).name: info.key for source in info.source}
        close = difflib.get_close_matches(text, list(names), _CLOSE, _SIMILAR)
        start = text[: max(2, len(text) * 2 // 3)].lower()
        begun = [key for key in self._keys if start and key.startswith(start)]
        keys = list(dict.fromkeys([*(names[name] for name in close), *begun]))
        return f"; did you mean {self._named(keys)}?" if keys else ""


def _has_step(pipeline: Pipeline | None, text: str) -> bool:
    wanted = text.casefold()
    return pipeline is not None and any(
        wanted in step.name.casefold() or wanted in str(step).casefold() for step in pipeline.steps
    )


def _no_cache(path: Path) -> str:
    """Say that there is no cache, and where one could be."""
    parent = path.absolute().parent
    if not path.exists():
        near = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        close = [str(path.parent / name) for name in difflib.get_close_matches(path.name, near, _CLOSE, _SIMILAR)]
        return f"there is no directory {path}" + (f"; did you mean {' or '.join(close)}?" if close else "")
    if not path.is_dir():
        return f"{path} is a file, not the directory of a cache"
    inside = [str(path / p.name) for p in sorted(path.iterdir()) if (p / "cache.zarr").is_dir()][:_CLOSE]
    if not inside and any(above.name == "cache.zarr" for above in path.absolute().parents):
        inside = [str(next(above.parent for above in path.absolute().parents if above.name == "cache.zarr"))]
    return f"there is no cache in {path}: it has no cache.zarr" + (
        f"; did you mean {' or '.join(inside)}?" if inside else ", which the first entry makes"
    )
