"""What mkdocs does beyond its plugins: the reference of the command line, generated from the command itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

_MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the reference in the place of its mark in ``cli.md``."""
    return markdown.replace(_MARK, _commands()) if page.file.src_uri == "cli.md" else markdown


def _commands() -> str:
    command = [sys.executable, "-m", "typer", "zcache.cli.app", "utils", "docs", "--name", "zcache"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - nothing from outside
    return text.partition("\n")[2]  # the page has a title of its own
