"""Caches and entries as rich tables, for terminals."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zcache.inspection import display

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView
    from zcache.inspection.summary import Summary
    from zcache.inspection.view import CacheView

__all__ = ["cache", "entry", "summary", "table"]

_ROWS = 50
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


def cache(view: CacheView) -> RenderableType:
    """Return a cache: its first entries, and the pipelines."""
    infos = view.infos
    now, by = dt.datetime.now(dt.UTC), display.letters(infos)
    parts: list[RenderableType] = [
        Text.assemble((display.clean(str(view.path)), "bold"), f": {display.totals_text(infos)}"),
        table(display.COLUMNS, [display.entry_row(info, by, now) for info in infos[:_ROWS]]),
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


def _field(line: str) -> Text:
    text = Text(line)
    text.stylize("dim", 0, 10)
    return text


def _pipelines(found: Summary) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for i, (pipeline, n) in enumerate(found.pipelines):
        entries = "1 entry" if n == 1 else f"{n:,} entries"
        parts += [Text(), Text(f"pipeline {display.letter(i)}, {entries}", style="bold")]
        for line in display.pipeline_lines(found, i, pipeline):
            styles = {"+": "green", "−": "red", "~": "yellow"}
            parts.append(Text(line, style=styles.get(line.strip()[:1], "")))
    return parts
