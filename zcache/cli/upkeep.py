"""Commands that keep a cache in order: is it sound, what can go."""

from __future__ import annotations

import datetime as dt
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from zcache.cli.options import CacheOption, JsonOption, PathArgument
from zcache.cli.output import FOUND, friendly, opened, print_json, progress, say, show_table
from zcache.errors import CacheConfigError
from zcache.inspection import display
from zcache.inspection.moments import parse_moment
from zcache.inspection.prune import candidates, plan, remove
from zcache.inspection.stale import Freshness, Sources, judge
from zcache.inspection.verify import Verdict, repair, verify
from zcache.inspection.view import CacheView
from zcache.units import parse_bytes

__all__ = ["prune", "verify_entries"]

RootOption = Annotated[
    Path | None,
    typer.Option(help="Where the data lie that a data set was given root= for.", show_default=False),
]


@friendly
def verify_entries(
    path: PathArgument = None,
    *,
    cache: CacheOption = None,
    repair_too: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; it is computed anew when it is next needed.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads that decode.", min=1)] = 2,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and check every checksum; list what is damaged, unreadable, foreign or of another format.

    Lists stale entries too, whose source files were changed or are gone: they are sound, and no longer used. What
    cannot be known is never called stale: entries without a record of their files (check_sources=False, or written by
    an older version), files whose folder is missing or empty (a disk that is not mounted), and files below a data set's
    root= unless --root says where that is now.
    """
    sources = Sources(root)
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
    fresh = {info.key: judge(info.stamps, sources.look) for info in view.infos if info.status == "ok"}
    repaired = {name.partition("/")[0] for name in removed}
    left = [v for v in checked if v.findings and v.status != "unknown format" and v.key not in repaired]
    if as_json:
        listed = [v.to_json() for v in checked if v.findings]
        whole = {"entries": len(checked), "checked_bytes": sum(v.checked_bytes for v in checked), "removed": removed}
        stale = [{"key": key, "reasons": list(f.reasons)} for key, f in fresh.items() if f.status == "stale"]
        counts = dict(Counter(f.status for f in fresh.values()))
        own = {"problem": view.problem, "findings": listed, "foreign": list(view.foreign)}
        print_json({**whole, **own, "stale": stale, "sources": counts})
    else:
        _say_stale(fresh, root)
        _say_verdicts(view, checked, removed)
    if left:
        raise typer.Exit(FOUND)


def _say_stale(fresh: dict[str, Freshness], root: Path | None) -> None:
    stale = {key: found for key, found in fresh.items() if found.status == "stale"}
    for key, found in stale.items():
        say(f"stale: {key[:12]} {'; '.join(found.reasons)}")
    if stale:
        say(f"{_entries(len(stale))} stale; zcache prune --stale removes what is")
    away = [found.reasons[0] for found in fresh.values() if found.status == "unknown" and found.reasons]
    if away:
        hint = "" if root is not None else "; --root says where the data lie now"
        say(f"sources of {_entries(len(away))} cannot be compared: {away[0]}{hint}")


def _entries(n: int) -> str:
    return "1 entry" if n == 1 else f"{n:,} entries"


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
        show_table(("key", "status", "where", "problem"), rows)
    for name in view.foreign:
        say(f"foreign: {name} is no entry")
    if view.problem:
        say(f"{view.path}: {view.problem}")
    for name in removed:
        say(f"removed {name}")
    nbytes = display.size_text(sum(v.checked_bytes for v in checked))
    bad = sum(bool(v.findings) for v in checked)
    say(f"{_entries(len(checked))}, {nbytes} read: {f'{bad:,} not sound' if bad else 'all sound'}")
    if not removed and any(v.status == "damaged" or any(f.in_index for f in v.findings) for v in checked):
        say("zcache verify --repair removes what is damaged; it is computed anew when it is next needed")


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
    stale: Annotated[
        bool, typer.Option("--stale", help="Remove what has a source file that was changed or is gone; see verify.")
    ] = False,
    root: RootOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove stale, old, unused or too many entries. What goes is computed anew when it is next needed."""
    if older_than is None and unused_since is None and max_size is None and not stale:
        raise CacheConfigError("say what can go: --stale, --older-than, --unused-since or --max-size")
    sources = Sources(root) if stale else None
    view = opened(path or cache)
    now = dt.datetime.now(dt.UTC)
    removals = plan(
        candidates(view, need_use=unused_since is not None or max_size is not None, sources=sources),
        stale=stale,
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
