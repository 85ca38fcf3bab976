"""The ``zcache`` command: looks into a cache, checks it, clears it up."""

from __future__ import annotations

import sys

__all__ = ["main"]

_NEEDED = frozenset({"click", "rich", "typer"})


def main() -> None:
    """Run the command; say what is missing if its extra is not installed."""
    try:
        from zcache.cli.app import app  # noqa: PLC0415 - typer may be missing
    except ModuleNotFoundError as e:
        if e.name not in _NEEDED:
            raise
        sys.stderr.write(f"The zcache command needs {e.name}, which is not installed: pip install 'zcache[inspect]'\n")
        sys.exit(2)
    app()
