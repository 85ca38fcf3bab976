"""How entries look: as text, as HTML for notebooks, as JSON and as rows of tables.

What comes from a cache may have been written by anybody: control characters are shown, not sent to the terminal, and
everything is escaped before it is put into HTML.
"""

from __future__ import annotations

import datetime as dt
import html
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zcache.encoding.payload import Json
from zcache.errors import ZCacheError
from zcache.inspection.listing import ArrayInfo, EntryInfo
from zcache.inspection.moments import age_text
from zcache.inspection.pipelines import Pipeline
from zcache.inspection.thumbnails import thumbnail_uri

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView
    from zcache.inspection.summary import Summary
    from zcache.inspection.view import CacheView

__all__ = ["COLUMNS", "clean", "entry_row", "letters", "table_text"]

COLUMNS = ("key", "age", "raw", "stored", "ratio", "by", "arrays", "source")
"""Of a list of entries; ``by`` is the letter of the pipeline."""

_RIGHT = frozenset({"age", "raw", "stored", "ratio", "entries"})
_SHOWN_ROWS = 20
_THUMBNAILS = 8
_KEY_CHARS = 12
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_KILO = 1000
_HOW = {"identity": "as is", "cast": "narrower type", "table": "look-up table", "affine": "rounded to a grid"}


def clean(text: str) -> str:
    r"""Return a text in which everything that could move a cursor or hide something is visible.

    Examples
    --------
    >>> clean("a\x1b[2Jb\u202e.nii")
    'a\\x1b[2Jb\\u202e.nii'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size_text(nbytes: float) -> str:
    """Return a number of bytes in three digits.

    Examples
    --------
    >>> [size_text(n) for n in (0, 999, 1500, 42_300_000)]
    ['0 B', '999 B', '1.5 KB', '42.3 MB']
    """
    unit = 0
    while nbytes >= _KILO and unit + 1 < len(_UNITS):
        nbytes, unit = nbytes / _KILO, unit + 1
    return f"{nbytes:.1f} {_UNITS[unit]}" if unit and nbytes < 100 else f"{nbytes:.0f} {_UNITS[unit]}"  # noqa: PLR2004


def ratio_text(ratio: float) -> str:
    """Return how many times smaller something is, ``-`` if it holds no arrays or is not known."""
    return f"{ratio:.1f}×" if ratio > 0 else "-"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as ``1×240×252×328``."""
    return "×".join(map(str, shape)) or "scalar"


def array_text(array: ArrayInfo) -> str:
    """Return an array in a few words."""
    types = array.dtype if array.dtype == array.stored_dtype else f"{array.dtype}→{array.stored_dtype}"
    return clean(f"{array.name} {shape_text(array.shape)} {types}")


def how_text(narrowing: str) -> str:
    """Return how values became what is stored."""
    return _HOW.get(narrowing, clean(narrowing))


def source_names(info: EntryInfo) -> list[str]:
    """Return the names of the files that an entry was made from, with their folder where it is another.

    Patients often have a folder each, and files of the same names in it.

    Examples
    --------
    >>> source_names(EntryInfo("", source=("/data/P1/ct.nii.gz", "/data/P1/seg.nii.gz", "/masks/P1.nii.gz")))
    ['P1/ct.nii.gz', 'seg.nii.gz', 'masks/P1.nii.gz']
    """
    names: list[str] = []
    folder: list[str] = []
    for source in info.source:
        *above, name = re.split(r"[\\/]" if "\\" in source else "/", source.rstrip("/"))
        inside = above[-1] if above else ""
        names.append(clean(name if above == folder or not inside else f"{inside}/{name}"))
        folder = above
    return names


def source_text(info: EntryInfo) -> str:
    """Return the names of the files that an entry was made from, or what is wrong with it."""
    if info.status != "ok":
        return clean(f"{info.status}: {info.problem}")
    return ", ".join(source_names(info)) or "?"


def letter(i: int) -> str:
    """Return the i-th of A, B, to Z, AA, AB and so on."""
    return (letter(i // 26 - 1) if i >= 26 else "") + chr(ord("A") + i % 26)  # noqa: PLR2004


def letters(infos: Sequence[EntryInfo]) -> dict[int, str]:
    """Return the letter of each pipeline, by the identity of its object; A is that of the most entries."""
    from zcache.inspection.summary import pipelines_of  # noqa: PLC0415 - it needs this module

    return {id(pipeline): letter(i) for i, (pipeline, _) in enumerate(pipelines_of(infos))}


def entry_row(info: EntryInfo, by: dict[int, str], now: dt.datetime) -> tuple[str, ...]:
    """Return the cells of one entry, by `COLUMNS`."""
    known = info.status == "ok"
    return (
        info.key[:_KEY_CHARS],
        age_text(info.created, now),
        size_text(info.raw_bytes) if known else "-",
        size_text(info.stored_bytes) if known else "-",
        ratio_text(info.ratio),
        by.get(id(info.pipeline), "-"),
        ", ".join(array_text(array) for array in info.arrays) or "-",
        source_text(info),
    )


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text: a thousand times faster than a drawn one, and easy to search."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    sides = [">" if column in _RIGHT else "<" for column in columns]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in (columns, *rows))


def totals_text(infos: Sequence[EntryInfo]) -> str:
    """Return the last line of a list."""
    raw, stored = sum(info.raw_bytes for info in infos), sum(info.stored_bytes for info in infos)
    bad = sum(info.status != "ok" for info in infos)
    entries = "1 entry" if len(infos) == 1 else f"{len(infos):,} entries"
    ratio = ratio_text(raw / stored if stored else math.nan)
    return f"{entries}, {size_text(raw)} in {size_text(stored)} ({ratio})" + (
        f", {bad} of them unusable" if bad else ""
    )


def cache_text(view: CacheView) -> str:
    """Return a cache as text, the first entries of it."""
    infos = view.infos
    head = f"{view.path}: {totals_text(infos)}" + (f"; {view.problem}" if view.problem else "")
    if not infos:
        return head
    now, by = dt.datetime.now(dt.UTC), letters(infos)
    rows = [entry_row(info, by, now) for info in infos[:_SHOWN_ROWS]]
    more = f"\n… and {len(infos) - _SHOWN_ROWS:,} more" if len(infos) > _SHOWN_ROWS else ""
    return f"{head}\n{table_text(COLUMNS, rows)}{more}"


def entry_text(entry: EntryView) -> str:
    """Return everything that a list knows of an entry as text."""
    info = entry.info
    lines = [f"{info.key}  {info.status}" + (f": {clean(info.problem)}" if info.problem else "")]
    if info.status != "ok":
        return lines[0]
    now = dt.datetime.now(dt.UTC)
    written = "" if info.created is None else f"{info.created:%Y-%m-%d %H:%M} UTC, {age_text(info.created, now)} ago"
    sizes = f"{size_text(info.raw_bytes)} in {size_text(info.stored_bytes)} ({ratio_text(info.ratio)})"
    lines += [f"written   {written or '?'}", f"size      {sizes}"]
    lines += [f"source    {clean(source)}" for source in info.source]
    lines += [f"array     {array_text(array)}  {array_detail(array)}" for array in info.arrays]
    lines += [
        f"index     {clean(index.name)}  {size_text(index.stored_bytes)}  {index_text(index.about, index.problem)}"
        for index in info.indexes
    ]
    steps = info.pipeline.steps if info.pipeline else ()
    lines += [f"step {i:<4} {clean(str(step))}" for i, step in enumerate(steps, 1)]
    return "\n".join(lines)


def array_detail(array: ArrayInfo) -> str:
    """Return how an array is stored."""
    lost = f", off by {array.max_abs_error:.3g} at most" if array.max_abs_error else ""
    sizes = f"{size_text(array.raw_bytes)} in {size_text(array.stored_bytes)}"
    return clean(f"{sizes}, {how_text(array.narrowing)}{lost}, {array.codec}, chunks {shape_text(array.chunk_shape)}")


def index_text(about: Json, problem: str) -> str:
    """Return what an index of voxels is of."""
    if problem or not isinstance(about, dict):
        return clean(f"damaged: {problem}" if problem else str(about))
    return clean(f"{about.get('sets')} of {about.get('label')}")


def summary_text(summary: Summary) -> str:
    """Return a summary as text."""
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.counts.items()) or "none"
    sizes = f"{size_text(summary.raw_bytes)} in {size_text(summary.stored_bytes)} ({ratio_text(summary.ratio)})"
    if summary.index_bytes:
        sizes += f", {size_text(summary.index_bytes)} of it indexes of voxels"
    lines = [str(summary.path), f"entries   {counts}", f"size      {sizes}"]
    if summary.problem:
        lines.append(f"problem   {clean(summary.problem)}")
    if summary.oldest and summary.newest:
        lines.append(f"written   {summary.oldest:%Y-%m-%d %H:%M} to {summary.newest:%Y-%m-%d %H:%M} UTC")
    if summary.foreign:
        lines.append(f"foreign   {', '.join(map(clean, summary.foreign[:_SHOWN_ROWS]))}")
    if summary.arrays:
        lines += ["", table_text(ARRAY_COLUMNS, array_rows(summary))]
    for i, (pipeline, n) in enumerate(summary.pipelines):
        lines += ["", f"pipeline {letter(i)}, {n:,} {'entry' if n == 1 else 'entries'}"]
        lines += pipeline_lines(summary, i, pipeline)
    return "\n".join(lines)


def pipeline_lines(summary: Summary, i: int, pipeline: Pipeline) -> list[str]:
    """Return a pipeline step by step, or what tells it from the first."""
    if not i:
        return [f"  {k}. {clean(str(step))}" for k, step in enumerate(pipeline.steps, 1)]
    return [f"  {clean(line)}" for line in summary.differences()[letter(i)] or ["the same, described otherwise"]]


ARRAY_COLUMNS = ("array", "entries", "dtype", "how", "raw", "stored", "ratio", "error")
"""Of the arrays in a summary."""


def array_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return the cells of the arrays in a summary."""
    return [
        (
            clean(group.name),
            f"{group.count:,}",
            clean(group.dtype if group.dtype == group.stored_dtype else f"{group.dtype}→{group.stored_dtype}"),
            how_text(group.narrowing),
            size_text(group.raw_bytes),
            size_text(group.stored_bytes),
            ratio_text(group.raw_bytes / group.stored_bytes if group.stored_bytes else math.nan),
            f"{group.max_abs_error:.3g}" if group.max_abs_error else "none",
        )
        for group in summary.arrays
    ]


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[str] = ()) -> str:
    """Return a table as HTML; cells are escaped, pictures are data URIs of one's own making."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = []
    for i, row in enumerate(rows):
        picture = f'<td><img src="{pictures[i]}" alt=""></td>' if i < len(pictures) and pictures[i] else "<td></td>"
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{picture if pictures else ''}{cells}</tr>")
    return f"<table><tr>{'<th></th>' if pictures else ''}{head}</tr>{''.join(lines)}</table>"


def cache_html(view: CacheView) -> str:
    """Return a cache as HTML: the first entries with small pictures, and what the pipelines are."""
    infos = view.infos
    now, by = dt.datetime.now(dt.UTC), letters(infos)
    shown = infos[:_SHOWN_ROWS]
    pictures = [_picture(view[info.key]) for info in shown[:_THUMBNAILS]]
    table = table_html(COLUMNS, [entry_row(info, by, now) for info in shown], pictures if any(pictures) else ())
    more = f"<p>… and {len(infos) - _SHOWN_ROWS:,} more</p>" if len(infos) > _SHOWN_ROWS else ""
    pipelines = _pipelines_html(view.summary())
    head = f"<b>{html.escape(clean(str(view.path)))}</b>: {html.escape(totals_text(infos))}"
    return f"<div><p>{head}</p>{table if infos else ''}{more}{pipelines}</div>"


def entry_html(entry: EntryView) -> str:
    """Return an entry as HTML, with its middle slices."""
    pictures = [] if entry.info.status != "ok" else [_picture(entry, v) for v in ("sagittal", "coronal", "axial")]
    images = " ".join(f'<img src="{uri}" alt="">' for uri in dict.fromkeys(pictures) if uri)
    return f"<div>{images}<pre>{html.escape(entry_text(entry))}</pre></div>"


def summary_html(summary: Summary) -> str:
    """Return a summary as HTML."""
    head = html.escape(summary_text(summary).partition("\n\n")[0])
    arrays = table_html(ARRAY_COLUMNS, array_rows(summary)) if summary.arrays else ""
    return f"<div><pre>{head}</pre>{arrays}{_pipelines_html(summary)}</div>"


def _pipelines_html(summary: Summary) -> str:
    parts = []
    for i, (pipeline, n) in enumerate(summary.pipelines):
        title = f"<summary>pipeline {letter(i)}, {n:,} {'entry' if n == 1 else 'entries'}</summary>"
        body = html.escape("\n".join(pipeline_lines(summary, i, pipeline)))
        parts.append(f"<details{' open' if len(summary.pipelines) > 1 else ''}>{title}<pre>{body}</pre></details>")
    return "".join(parts)


def _picture(entry: EntryView, view: str = "axial") -> str:
    try:
        return thumbnail_uri(entry, view)
    except (ZCacheError, OSError):  # a list shows what it can
        return ""


def json_number(value: Any) -> Any:
    """Return a value that JSON has: None in place of NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_time(moment: dt.datetime | None) -> str | None:
    """Return a moment as ISO 8601."""
    return None if moment is None else moment.isoformat()


def entry_json(info: EntryInfo, *, steps: bool = True) -> Json:
    """Return what a list knows of an entry as JSON, with or without the steps of its pipeline."""
    own = {
        "key": info.key,
        "status": info.status,
        "problem": info.problem,
        "created": json_time(info.created),
        "source": list(info.source),
        "raw_bytes": info.raw_bytes,
        "stored_bytes": info.stored_bytes,
        "ratio": json_number(info.ratio),
        "arrays": [{name: json_number(getattr(array, name)) for name in ArrayInfo.__slots__} for array in info.arrays],
        "indexes": [
            {name: getattr(index, name) for name in ("name", "about", "stored_bytes", "problem")}
            for index in info.indexes
        ],
    }
    return {**own, "pipeline": info.pipeline.to_json() if info.pipeline else None} if steps else own


def dataframe_rows(infos: Sequence[EntryInfo]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the names of columns and the rows of a table of arrays."""
    names = ["shape", "dtype", "stored_dtype", "narrowing", "max_abs_error", "raw_bytes", "stored_bytes"]
    columns = ["key", "status", "created", "source", "pipeline", "array", *names, "ratio"]
    by = letters(infos)
    rows: list[tuple[Any, ...]] = []
    for info in infos:
        own = (info.key, info.status, info.created, ", ".join(info.source), by.get(id(info.pipeline)))
        rows += [(*own, array.name, *(getattr(array, name) for name in names), array.ratio) for array in info.arrays]
        if not info.arrays:
            rows.append((*own, *[None] * (len(names) + 2)))
    return columns, rows
