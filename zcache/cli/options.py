"""Arguments and options that several commands have, and what the shell completes them with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zcache.cli.output import opened
from zcache.errors import ZCacheError
from zcache.inspection.display import source_text

__all__ = ["HELP_KEY", "HELP_PATH", "CacheOption", "JsonOption", "KeyArgument", "PathArgument", "complete_key"]

HELP_PATH = "The cache directory; $ZCACHE_DIR or the user's cache directory if left out."
HELP_KEY = "A key, the beginning of one, or a part of a source path or value that only one entry has."

_KEY_CHARS = 12
_EXPLAINED = 50  # more entries than a shell lists are completed without a word on each


def complete_key(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the keys that begin with what was typed, with the files that they were made from.

    The cache is that of ``-C``, if it was typed before, else the default one.
    """
    try:
        view = opened(ctx.params.get("cache"))
        keys = [key for key in view if key.startswith(incomplete)]
        shown = [key if len(incomplete) > _KEY_CHARS else key[:_KEY_CHARS] for key in keys]
        if len(keys) > _EXPLAINED:
            return [(text, "") for text in shown]
        return [(text, source_text(view[key].info)) for text, key in zip(shown, keys, strict=True)]
    except (ZCacheError, OSError):  # a shell has nowhere to show it
        return []


PathArgument = Annotated[Path | None, typer.Argument(metavar="CACHE", help=HELP_PATH, show_default=False)]
CacheOption = Annotated[Path | None, typer.Option("--cache", "-C", help=HELP_PATH, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=HELP_KEY, autocompletion=complete_key)]
