"""Packages that only parts of the inspection need: imported when they are, with a sentence where they are missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from zcache.errors import DISTRIBUTION, MissingExtraError

__all__ = ["load", "module"]


def module(name: str, extra: str = "inspect") -> ModuleType:
    """Import an optional package, or a module that needs one, which an extra of this package brings.

    Raises
    ------
    MissingExtraError
        It is not installed; the message says how to.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        package = (e.name or name).partition(".")[0]
        command = f"pip install '{DISTRIBUTION}[{extra}]'"
        raise MissingExtraError(f"{package} is not installed, which this needs: {command}") from e


def load(room: str, extra: str = "inspect") -> ModuleType:
    """Import a module of this package that needs an optional one.

    Raises
    ------
    MissingExtraError
        As of `module`.
    """
    return module(f"zcache.inspection.{room}", extra)
