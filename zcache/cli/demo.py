"""``zcache demo``: a small cache of generated patients, and what the other commands show of it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zcache.cli.output import friendly, say
from zcache.errors import CacheConfigError, ZCacheError
from zcache.inspection import extras
from zcache.inspection.view import open_cache

__all__ = ["demo"]

# In a process of its own: this one starts fast because it imports neither torch nor MONAI.
_EXAMPLE = "zcache.training.example"
_PATIENT = "patient_002"
_WINDOW = "soft tissue"
_COLUMNS = 100
_NEXT = "zcache-demo"


@friendly
def demo(
    *,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to leave data, cache and picture; new or empty.", show_default=False),
    ] = None,
) -> None:
    """Make a small cache of generated patients and show what can be seen of it, in half a minute."""
    for package in ("nibabel", "matplotlib"):  # known now, not after half a minute
        extras.module(package)
    with _folder(keep) as folder:
        _make(folder)
        _look(folder)
    _say_what_next(keep)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Give the folder to work in, which is gone afterwards if nobody wants it, or if it was not completed."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="zcache-demo-") as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise CacheConfigError(f"{keep} is not an empty folder: give a new one, which nothing can be lost in")
    keep.mkdir(parents=True, exist_ok=True)
    try:
        yield keep
    except BaseException:
        shutil.rmtree(keep)
        raise


def _make(folder: Path) -> None:
    """Have the example made, with a bar that says how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415 - slow to import

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        tempfile.TemporaryFile() as errors,
        # A session of its own: Ctrl-C reaches this process alone, which then ends that one.
        subprocess.Popen(  # noqa: S603 - nothing of it comes from outside
            [sys.executable, "-m", _EXAMPLE, str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("starting MONAI", total=None)
        try:
            for line in process.stdout or ():
                done, _, what = line.strip().partition(" ")
                i, _, n = done.partition("/")
                bar.update(task, completed=int(i), total=int(n), description=what)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise ZCacheError(f"the example could not be made: {last or f'exit code {process.returncode}'}")


def _look(folder: Path) -> None:
    """Show what the commands show, each with what one would type."""
    from zcache.cli.app import info, list_entries  # noqa: PLC0415 - it registers this command
    from zcache.cli.blocks import drawn  # noqa: PLC0415
    from zcache.cli.upkeep import verify_entries  # noqa: PLC0415

    cache = folder / "cache"
    say("4 patients, generated; cached by one pipeline, and 2 of them by another.\n")
    _say_command(f"ls {cache}")
    list_entries(cache)
    _say_command(f"info {cache}")
    info(cache=cache)
    key = list(open_cache(cache).find(_PATIENT))
    entry = next(e for e in map(open_cache(cache).resolve, key) if "ScaleIntensityRanged" not in " ".join(e.pipeline))
    _say_command(f"show {entry.key[:12]} -C {cache} --window '{_WINDOW}'")
    picture = folder / f"{entry.key[:12]}.png"
    entry.plot(window=_WINDOW).savefig(picture)
    say(str(picture))
    console = Console()
    if console.is_terminal:
        console.print(drawn(entry, min(console.width, _COLUMNS), _WINDOW))
    _say_command(f"verify {cache}")
    verify_entries(cache)


def _say_command(arguments: str) -> None:
    typer.secho(f"\n$ zcache {arguments}", bold=True)


def _say_what_next(keep: Path | None) -> None:
    folder = keep or Path(_NEXT)
    cache = folder / "cache"
    say("\nTry next:")
    if keep is None:
        say(f"  zcache demo --keep {folder}    all of this was removed; this leaves it, for the rest")
    for command in (
        f"info {_PATIENT[:-1]}3 -C {cache}",
        f"show {_PATIENT[:-1]}3 -C {cache} --mosaic --window lung -o mosaic.png",
        f"ls {cache} --transform ScaleIntensityRanged",
        f"stats {cache}",
        f"prune {cache} --older-than 30d --dry-run",
    ):
        say(f"  zcache {command}")
