"""Caches and entries as rich tables, for terminals."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from zcache.inspection import display
from zcache.inspection.listing import EntryInfo

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView
    from zcache.inspection.summary import Summary
    from zcache.inspection.view import CacheView

__all__ = ["cache", "entries", "entry", "summary", "table"]

_ROWS = 50
_WIDE = 120  # columns from which on all is drawn
_FIELD = 10
_STYLES = {"key": "cyan", "ratio": "green", "source": "bold", "array": "cyan"}
_RIGHT = frozenset({"age", "raw", "stored", "ratio", "entries"})


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows as a table; no cell is taken for markup."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        drawn.add_column(
            column,
            justify="right" if column in _RIGHT else "left",
            style=_STYLES.get(column, ""),
            overflow="fold" if column in ("source", "arrays") else "ellipsis",
            no_wrap=column not in ("source", "arrays", "problem"),
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def entries(infos: Sequence[EntryInfo], by: dict[int, str], now: dt.datetime) -> RenderableType:
    """Return a list of entries, an array and a source file to a line; a narrow terminal gets no raw sizes."""
    return _Entries(infos, by, now)


class _Entries:
    def __init__(self, infos: Sequence[EntryInfo], by: dict[int, str], now: dt.datetime) -> None:
        self._infos, self._by, self._now = infos, by, now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [name for name in display.COLUMNS if name != "raw" or options.max_width >= _WIDE]
        rows = []
        for info in self._infos:
            cells = dict(zip(display.COLUMNS, display.entry_row(info, self._by, self._now), strict=True))
            if info.status == "ok":
                cells["arrays"] = "\n".join(map(display.array_text, info.arrays)) or "-"
                cells["source"] = "\n".join(display.source_names(info)) or "?"
            rows.append([cells[name] for name in names])
        yield table(names, rows)


def cache(view: CacheView) -> RenderableType:
    """Return a cache: its first entries, and the pipelines."""
    infos = view.infos
    now, by = dt.datetime.now(dt.UTC), display.letters(infos)
    parts: list[RenderableType] = [
        Text.assemble((display.clean(str(view.path)), "bold"), f": {display.totals_text(infos)}"),
        entries(infos[:_ROWS], by, now),
    ]
    if len(infos) > _ROWS:
        parts.append(Text(f"… and {len(infos) - _ROWS:,} more", style="dim"))
    return Group(*parts, *_pipelines(view.summary()))


def entry(view: EntryView) -> RenderableType:
    """Return what a list knows of an entry."""
    lines = display.entry_text(view).splitlines()
    return Group(Text(lines[0], style="bold"), *(_field(line) for line in lines[1:]))


def summary(found: Summary) -> RenderableType:
    """Return a summary."""
    lines = display.summary_text(found).partition("\n\n")[0].splitlines()
    parts: list[RenderableType] = [Text(lines[0], style="bold"), *(_field(line) for line in lines[1:])]
    if found.arrays:
        parts += [Text(), table(display.ARRAY_COLUMNS, display.array_rows(found))]
    return Group(*parts, *_pipelines(found))


def _field(line: str) -> RenderableType:
    return _hanging(Text(line[:_FIELD].rstrip(), style="dim"), Text(line[_FIELD:]), _FIELD - 1)


def _hanging(mark: Text, text: Text, width: int) -> RenderableType:
    """Return a text whose further lines begin where the first does, after its mark."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, min_width=width)
    grid.add_column(overflow="fold")
    grid.add_row(mark, text)
    return grid


def _pipelines(found: Summary) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for i, (pipeline, n) in enumerate(found.pipelines):
        counted = "1 entry" if n == 1 else f"{n:,} entries"
        parts += [Text(), Text(f"pipeline {display.letter(i)}, {counted}", style="bold")]
        for line in display.pipeline_lines(found, i, pipeline):
            mark, _, text = line.strip().partition(" ")
            style = {"+": "green", "−": "red", "~": "yellow"}.get(mark, "")
            parts.append(_hanging(Text(f"  {mark}", style=style), Text(text, style=style), 4))
    return parts
