"""The commands."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

import zcache
from zcache.cli.demo import demo
from zcache.cli.options import HELP_KEY, CacheOption, JsonOption, KeyArgument, PathArgument, complete_key
from zcache.cli.output import FOUND, friendly, opened, print_json, say, show, show_table
from zcache.cli.pictures import export, show_entry
from zcache.cli.upkeep import prune, verify_entries
from zcache.errors import CacheConfigError
from zcache.inspection import display, rich_tables
from zcache.inspection.compare import compare
from zcache.inspection.listing import EntryInfo
from zcache.inspection.view import CacheView

__all__ = ["app"]

app = typer.Typer(
    name="zcache",
    help="Look into a training cache, check it, clear it up.",
    epilog="zcache demo shows it all on a cache of its own making. --install-completion lets the shell complete "
    "commands, options and keys (of the cache after -C, if that comes before). Exit codes: 0 done; 1 verify found "
    "damage, or diff a difference; 2 a wrong path, key or option, or the file system refused; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_DRAWN_ROWS = 300  # drawing a table of thousands of rows takes longer than reading the cache
_LARGEST = 5
_AGES = (("a day", 1), ("a week", 7), ("a month", 30), ("a year", 365))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(zcache.__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("ls")
@friendly
def list_entries(
    path: PathArgument = None,
    *,
    cache: CacheOption = None,
    find: Annotated[str | None, typer.Option(help="Only entries with this in a source path or value.")] = None,
    transform: Annotated[str | None, typer.Option(help="Only entries made with this transform.")] = None,
    since: Annotated[str | None, typer.Option(help="Only entries written since, such as 2026-01-31 or 30d.")] = None,
    before: Annotated[str | None, typer.Option(help="Only entries written before.")] = None,
    status: Annotated[str | None, typer.Option(help="Such as ok or damaged.")] = None,
    sort: Annotated[str, typer.Option(help="source, age, size, ratio or key.")] = "source",
    limit: Annotated[int | None, typer.Option(help="At most so many.", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """List entries: age, size, pipeline, shapes and types, source."""
    view = opened(path or cache)
    view = view if find is None else view.find(find)
    if transform or since or before or status:
        view = view.filter(transform=transform, since=since, before=before, status=status)  # type: ignore[arg-type]
    order = _ORDERS.get(sort)
    if order is None:
        raise CacheConfigError(f"--sort {sort} is none of {', '.join(_ORDERS)}")
    found = view.infos
    infos = sorted(found, key=order)[:limit]
    now, by = dt.datetime.now(dt.UTC), display.letters(found)
    if as_json:
        entries = [{**display.entry_json(i, steps=False), "pipeline": by.get(id(i.pipeline))} for i in infos]
        pipelines = {by[id(i.pipeline)]: i.pipeline.to_json() for i in found if i.pipeline is not None}
        print_json({"path": str(view.path), "entries": entries, "pipelines": pipelines, "foreign": list(view.foreign)})
        return
    rows = [display.entry_row(info, by, now) for info in infos]
    if rows and len(rows) <= _DRAWN_ROWS:
        show(lambda: display.table_text(display.COLUMNS, rows), lambda: rich_tables.entries(infos, by, now))
    elif rows:
        typer.echo(display.table_text(display.COLUMNS, rows))
    _say_totals(view, infos, len(found))


_ORDERS = {
    "source": lambda info: (info.status == "ok", info.source, info.key),  # what is wrong comes first
    "age": lambda info: (info.created is None, info.created, info.key),
    "size": lambda info: (-info.stored_bytes, info.key),
    "ratio": lambda info: (-info.ratio if info.ratio == info.ratio else 0, info.key),
    "key": lambda info: info.key,
}


def _say_totals(view: CacheView, infos: list[EntryInfo], n: int) -> None:
    more = f" (of {n:,})" if n > len(infos) else ""
    say(f"{display.totals_text(infos)}{more}")
    if view.problem:
        say(f"{view.path}: {view.problem}")
    if view.foreign:
        say(f"not of the cache: {', '.join(view.foreign)}")


@app.command()
@friendly
def info(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help=HELP_KEY, show_default=False, autocompletion=complete_key)
    ] = None,
    *,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one entry, or what is in the cache and the pipelines that made it."""
    if key is not None and cache is None and Path(key).is_dir():
        cache, key = Path(key), None
    view = opened(cache)
    if key is None:
        summary = view.summary()
        if as_json:
            print_json(summary.to_json())
        else:
            show(lambda: display.summary_text(summary), lambda: rich_tables.summary(summary))
        return
    entry = view.resolve(key)
    details = entry.info.status == "ok"
    values = entry.scalars if details else {}
    small = [place for place in entry.places if not place.name] if details else []
    if as_json:
        print_json({**display.entry_json(entry.info), "path": str(entry.path), "values": values})
        return
    show(lambda: display.entry_text(entry), lambda: rich_tables.entry(entry))
    for place in small:
        say(f"small     {place.place} {display.shape_text(place.shape)} {place.dtype}")
    for name, value in values.items():
        say(f"value     {name} = {value:.200}")


@app.command()
@friendly
def stats(path: PathArgument = None, *, cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Show what takes how much: by array, by age, the largest entries."""
    view = opened(path or cache)
    summary, infos = view.summary(), view.infos
    now = dt.datetime.now(dt.UTC)
    largest = sorted(infos, key=lambda i: -i.stored_bytes)[:_LARGEST]
    ages = _by_age(infos, now)
    if as_json:
        whole = {k: v for k, v in summary.to_json().items() if k not in ("pipelines", "differences")}
        by_age = [{"age": age, "entries": n, "stored_bytes": nbytes} for age, n, nbytes in ages]
        print_json({**whole, "ages": by_age, "largest": [display.entry_json(i, steps=False) for i in largest]})
        return
    say(display.summary_text(summary).partition("\n\n")[0])
    rows = [(age, f"{n:,}", display.size_text(nbytes)) for age, n, nbytes in ages]
    by = display.letters(infos)
    for columns, cells in (
        (display.ARRAY_COLUMNS, display.array_rows(summary)),
        (("written", "entries", "stored"), rows),
    ):
        if cells:
            typer.echo()
            show_table(columns, cells)
    if largest:
        typer.echo()
        cells = [display.entry_row(i, by, now) for i in largest]
        show(lambda: display.table_text(display.COLUMNS, cells), lambda: rich_tables.entries(largest, by, now))


def _by_age(infos: list[EntryInfo], now: dt.datetime) -> list[tuple[str, int, int]]:
    names = [f"less than {name} ago" for name, _ in _AGES] + [f"more than {_AGES[-1][0]} ago"]
    found = {name: [0, 0] for name in names}
    for entry in infos:
        if entry.created is not None:
            days = (now - entry.created).total_seconds() / 86400
            name = next((name for name, (_, limit) in zip(names, _AGES, strict=False) if days < limit), names[-1])
            found[name][0] += 1
            found[name][1] += entry.stored_bytes
    return [(name, n, nbytes) for name, (n, nbytes) in found.items() if n]


@app.command()
@friendly
def diff(a: KeyArgument, b: KeyArgument, *, cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Tell two entries apart: source, pipeline, values. Exit code 1 if the items differ."""
    view = opened(cache)
    found = compare(view.resolve(a), view.resolve(b))
    if as_json:
        print_json(found.to_json())
    else:
        for name in ("source", "pipeline", "values", "arrays"):
            lines = getattr(found, name)
            say(f"{name}: {'the same' if not lines else ''}".rstrip())
            for line in lines:
                say(f"  {line}")
    if not found.same:
        raise typer.Exit(FOUND)


app.command("show")(show_entry)
app.command()(export)
app.command("verify")(verify_entries)
app.command()(prune)
app.command()(demo)
