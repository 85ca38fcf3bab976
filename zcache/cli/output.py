"""What all commands share: where the cache is, how errors and results are shown."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec

import platformdirs
import typer
from rich.console import Console, RenderableType

from zcache.encoding.payload import Json
from zcache.errors import ZCacheError
from zcache.inspection import rich_tables
from zcache.inspection.display import clean, table_text
from zcache.inspection.view import CacheView, open_cache

__all__ = [
    "CANNOT",
    "FOUND",
    "INTERRUPTED",
    "default_cache_dir",
    "friendly",
    "opened",
    "print_json",
    "progress",
    "say",
    "show",
    "show_table",
]

P = ParamSpec("P")

FOUND: Final = 1
"""Exit code: what was asked for is the case, such as damage or a difference."""

CANNOT: Final = 2
"""Exit code: a wrong path, key or option, or the file system refused."""

INTERRUPTED: Final = 130
"""Exit code: Ctrl-C."""


def default_cache_dir() -> Path:
    """Return where caches go that are given no directory, as `zcache.PersistentDataset` has it."""
    return Path(os.environ.get("ZCACHE_DIR") or platformdirs.user_cache_dir("zcache", appauthor=False))


def opened(path: Path | None) -> CacheView:
    """Open the cache that is meant."""
    return open_cache(default_cache_dir() if path is None else path)


def friendly(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end with a sentence and an exit code where it would end with a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader of a pipe has seen enough; typer knows what to do
            raise
        except (ZCacheError, OSError) as e:
            typer.echo(f"zcache: {clean(_sentence(e))}", err=True)
            raise typer.Exit(CANNOT) from None
        except KeyboardInterrupt:
            typer.echo("zcache: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return run


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ZCacheError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def say(text: str) -> None:
    """Print a line that came from a cache or may hold such text."""
    typer.echo("\n".join(clean(line) for line in text.split("\n")))


def print_json(data: Json) -> None:
    """Print JSON."""
    typer.echo(json.dumps(data, allow_nan=False))


def show(text: Callable[[], str], drawn: Callable[[], RenderableType]) -> None:
    """Print a table: drawn on a terminal, plain where a program reads it."""
    console = Console()
    if console.is_terminal:
        console.print(drawn())
    else:
        typer.echo(text())


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table."""
    show(lambda: table_text(columns, rows), lambda: rich_tables.table(columns, rows))


def progress(description: str) -> Any:
    """Return a progress bar on stderr, invisible where that is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
