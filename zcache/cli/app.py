"""The commands."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from zcache.cli.output import FOUND, friendly, opened, print_json, progress, say, show
from zcache.errors import CacheConfigError
from zcache.inspection import display, rich_tables
from zcache.inspection.compare import compare
from zcache.inspection.listing import EntryInfo
from zcache.inspection.moments import parse_moment
from zcache.inspection.prune import candidates, plan, remove
from zcache.inspection.verify import Verdict, repair, verify
from zcache.inspection.view import CacheView
from zcache.units import parse_bytes

__all__ = ["app"]

app = typer.Typer(
    name="zcache",
    help="Look into a training cache, check it, clear it up.",
    epilog="Exit codes: 0 done; 1 verify found damage, or diff a difference; 2 a wrong path, key or option, or the "
    "file system refused; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DRAWN_ROWS = 300  # drawing a table of thousands of rows takes longer than reading the cache
_LARGEST = 5
_AGES = (("a day", 1), ("a week", 7), ("a month", 30), ("a year", 365))
_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".pdf", ".svg", ".webp"})
_HELP_PATH = "The cache directory; $ZCACHE_DIR or the user's cache directory if left out."
_HELP_KEY = "A key, the beginning of one, or a part of a source path or value that only one entry has."

PathArgument = Annotated[Path | None, typer.Argument(metavar="[CACHE]", help=_HELP_PATH, show_default=False)]
CacheOption = Annotated[Path | None, typer.Option("--cache", "-C", help=_HELP_PATH, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=_HELP_KEY)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("zcache"))
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
        show(lambda: display.table_text(display.COLUMNS, rows), lambda: rich_tables.table(display.COLUMNS, rows))
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
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help=_HELP_KEY, show_default=False)] = None,
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
    tables: tuple[tuple[Sequence[str], Sequence[Sequence[str]]], ...] = (
        (display.ARRAY_COLUMNS, display.array_rows(summary)),
        (("written", "entries", "stored"), rows),
        (display.COLUMNS, [display.entry_row(i, by, now) for i in largest]),
    )
    for columns, cells in tables:
        if cells:
            typer.echo()
            _show_table(columns, cells)


def _show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    def drawn() -> RenderableType:
        return rich_tables.table(columns, rows)

    show(lambda: display.table_text(columns, rows), drawn)


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


@app.command("verify")
@friendly
def verify_entries(
    path: PathArgument = None,
    *,
    cache: CacheOption = None,
    repair_too: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; it is computed anew when it is next needed.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads that decode.", min=1)] = 2,
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and check every checksum; list what is damaged, unreadable, foreign or of another format."""
    view = opened(path or cache)
    total = sum(info.stored_bytes for info in view.infos)
    checked: list[Verdict] = []
    with progress("checking") as bar:
        task = bar.add_task("checking", total=total)
        for verdict in verify(view, threads):
            checked.append(verdict)
            bar.update(task, advance=view[verdict.key].info.stored_bytes)
    removed: list[str] = []
    if repair_too:
        for verdict in checked:
            if verdict.findings:
                removed += repair(view.store, verdict)
        view.store.close()
    repaired = {name.partition("/")[0] for name in removed}
    left = [v for v in checked if v.findings and v.status != "unknown format" and v.key not in repaired]
    if as_json:
        listed = [v.to_json() for v in checked if v.findings]
        whole = {"entries": len(checked), "checked_bytes": sum(v.checked_bytes for v in checked), "removed": removed}
        print_json({**whole, "problem": view.problem, "findings": listed, "foreign": list(view.foreign)})
    else:
        _say_verdicts(view, checked, removed)
    if left:
        raise typer.Exit(FOUND)


def _say_verdicts(view: CacheView, checked: list[Verdict], removed: list[str]) -> None:
    rows = [
        (
            v.key[:12],
            v.status if v.status != "ok" else "index damaged",
            finding.where or "-",
            display.clean(finding.problem),
        )
        for v in checked
        for finding in v.findings
    ]
    if rows:
        _show_table(("key", "status", "where", "problem"), rows)
    for name in view.foreign:
        say(f"foreign: {name} is no entry")
    if view.problem:
        say(f"{view.path}: {view.problem}")
    for name in removed:
        say(f"removed {name}")
    nbytes = display.size_text(sum(v.checked_bytes for v in checked))
    bad = sum(bool(v.findings) for v in checked)
    entries = "1 entry" if len(checked) == 1 else f"{len(checked):,} entries"
    say(f"{entries}, {nbytes} read: {f'{bad:,} not sound' if bad else 'all sound'}")


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


@app.command("show")
@friendly
def show_entry(
    key: KeyArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="KEY.png if left out.")] = None,
    *,
    cache: CacheOption = None,
    image: Annotated[str | None, typer.Option(help="Which array.")] = None,
    label: Annotated[str | None, typer.Option(help="Which array to draw over it.")] = None,
    no_label: Annotated[bool, typer.Option("--no-label", help="Draw no label.")] = False,
    channel: Annotated[int, typer.Option(help="Which channel or point in time.")] = 0,
) -> None:
    """Draw the middle slices of an entry into a picture."""
    entry = opened(cache).resolve(key)
    path = Path(f"{entry.key[:12]}.png") if output is None else output
    if path.suffix.lower() not in _PICTURES:
        raise CacheConfigError(f"{path} should end in one of {', '.join(sorted(_PICTURES))}")
    figure = entry.plot(image, False if no_label else label, channel=channel)
    figure.savefig(path)
    say(str(path))


@app.command()
@friendly
def export(
    key: KeyArgument,
    output: Annotated[Path, typer.Argument(help="Ends in .nii.gz or .nii.")],
    *,
    cache: CacheOption = None,
    array: Annotated[str | None, typer.Option(help="Which array; the image if left out.")] = None,
) -> None:
    """Write an array of an entry as NIfTI."""
    say(str(opened(cache).resolve(key).to_nifti(output, array)))


@app.command()
@friendly
def prune(
    path: PathArgument = None,
    *,
    cache: CacheOption = None,
    older_than: Annotated[str | None, typer.Option(help="Remove what was written before: 30d, 2026-01-31.")] = None,
    unused_since: Annotated[
        str | None, typer.Option(help="Remove what was last read before: 30d. Verify, show, export read too.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Remove what was not read for longest, until so much is left: 20GiB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old, unused or too many entries. What goes is computed anew when it is next needed."""
    if older_than is None and unused_since is None and max_size is None:
        raise CacheConfigError("say what can go: --older-than, --unused-since or --max-size")
    view = opened(path or cache)
    now = dt.datetime.now(dt.UTC)
    removals = plan(
        candidates(view, need_use=unused_since is not None or max_size is not None),
        older_than=None if older_than is None else parse_moment(older_than, now, "--older-than"),
        unused_since=None if unused_since is None else parse_moment(unused_since, now, "--unused-since"),
        max_size=None if max_size is None else parse_bytes(max_size, "--max-size"),
    )
    nbytes = sum(removal.entry.stored_bytes for removal in removals)
    if not as_json and removals:
        rows = [(r.entry.key[:12], display.size_text(r.entry.stored_bytes), r.reason, r.entry.source) for r in removals]
        typer.echo(display.table_text(("key", "stored", "reason", "source"), rows))
    if removals and not dry_run and not yes and not _confirmed(len(removals), nbytes):
        raise typer.Exit(FOUND)
    if not dry_run:
        try:
            for removal in removals:
                remove(view.store, removal.entry.key)
        finally:
            view.store.close()
    if as_json:
        print_json({"dry_run": dry_run, "removed": [r.to_json() for r in removals], "stored_bytes": nbytes})
        return
    what = f"{len(removals):,} of {len(view):,} entries, {display.size_text(nbytes)}"
    say(f"{'would remove' if dry_run else 'removed'} {what}")


def _confirmed(n: int, nbytes: int) -> bool:
    if not sys.stdin.isatty():
        raise CacheConfigError("nothing was removed: there is nobody to ask; add --yes, or --dry-run to see what goes")
    return typer.confirm(f"Remove {n:,} entries, {display.size_text(nbytes)}?")
