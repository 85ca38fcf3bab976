"""Node.js, its packages and a browser: where they are, and a skip, or in continuous integration a failure, if not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = ["FOLDER", "browser", "node", "run_node"]

FOLDER = Path(__file__).parent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_PATIENCE_S = 120
_NODE = (20, 11)


@cache
def node() -> str:
    """Find Node.js; the packages are there too."""
    found = shutil.which("node") or _lacks("Node.js is not installed")
    version = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
    ).stdout
    if tuple(map(int, version.strip().lstrip("v").split(".")[:2])) < _NODE:
        _lacks(f"Node.js is {version.strip()}, too old: at least {_NODE[0]}.{_NODE[1]} is needed")
    if not (FOLDER / "node_modules" / ".package-lock.json").is_file():
        _lacks("the JavaScript packages are not installed: make viewers does that, where npm is")
    return found


def browser() -> str:
    """Find Chromium."""
    found = (shutil.which(name) for name in _BROWSERS)
    return next(filter(None, found), None) or _lacks(f"no browser is installed: none of {', '.join(_BROWSERS)}")


def run_node(script: str, *args: str, asked: Any = None) -> str:
    """Run one of this folder's scripts with JSON on its stdin; return what it printed."""
    done = subprocess.run(
        [node(), str(FOLDER / script), *args],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _lacks(what: str) -> NoReturn:
    # A skip that nobody sees would let the format drift.
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, which continuous integration must have")
    pytest.skip(what)
