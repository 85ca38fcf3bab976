"""What a pipeline did, for people: the steps with their parameters, as shown when a cache is inspected."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from zcache.keys.functions import function_node
from zcache.keys.objects import attributes, is_named
from zcache.keys.values import Json

__all__ = ["describe"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TEXT, _ITEMS, _DEPTH = 160, 16, 5  # what is shown of a text, of a container, and of nested transforms


def describe(obj: object) -> list[Json]:
    """Describe a pipeline for people: what was done, in order, with which parameters.

    Parameters
    ----------
    obj : object
        A transform, a `Compose`, a sequence of transforms, or None.

    Returns
    -------
    list of Json
        For every step ``{"transform": …, "module": …, "parameters": {…}}``. Long values are abbreviated, functions are
        shown by their source. Odd values never raise.

    Examples
    --------
    >>> describe([abs])
    [{'transform': 'abs', 'module': 'builtins', 'parameters': {}}]
    """
    return [_brief(step, 0, _step) for step in _steps(obj, 0)]


def _steps(obj: object, depth: int) -> Iterator[object]:
    """Flatten lists and plain `Compose` objects; what chooses among its transforms, such as `OneOf`, is one step."""
    parts = obj if isinstance(obj, list | tuple) else None
    if parts is None and type(obj).__name__ == "Compose":
        parts = getattr(obj, "transforms", None)
    if isinstance(parts, list | tuple) and depth < _DEPTH:
        for part in parts:
            yield from _steps(part, depth + 1)
    elif obj is not None:
        yield obj


def _step(step: object, depth: int) -> dict[str, Json]:
    named = step if isinstance(step, type) or hasattr(step, "__qualname__") else type(step)
    form: dict[str, Json] = {
        "transform": str(getattr(named, "__qualname__", "?")),
        "module": str(getattr(named, "__module__", None) or "builtins"),
        "parameters": {},
    }
    if named is not step:
        form["parameters"] = {name: _brief(value, depth) for name, value in _parameters(step).items()}
    elif isinstance(step, types.FunctionType) and not is_named(step):
        form["source"] = _brief(step, depth)
    return form


def _parameters(step: object) -> dict[str, Any]:
    """Find the values of a transform's constructor parameters among its attributes.

    MONAI's dictionary transforms keep most of them in the array transform that they wrap.
    """
    if isinstance(step, functools.partial):
        return {"func": step.func, "args": step.args, "keywords": step.keywords}
    own = attributes(step)
    inner = [attributes(value) for value in own.values() if _is_monai(value)]
    inner += [attributes(value) for part in inner for value in part.values() if _is_monai(value)]
    try:
        names = list(inspect.signature(type(step).__init__).parameters)[1:]
    except (TypeError, ValueError):  # a C type
        names = []
    found = {}
    for name in names:
        for state in (own, *inner):
            match = next((key for key in (name, f"_{name}") if key in state), None)
            if match is not None:
                found[name] = state[match]
                break
    rest = {name: value for name, value in own.items() if not name.startswith("_") and not _is_monai(value)}
    return found | {name: value for name, value in rest.items() if name not in found}


def _is_monai(value: object) -> bool:
    return type(value).__module__.startswith("monai.") and not isinstance(value, enum.Enum)


def _brief(value: Any, depth: int, how: Callable[[Any, int], Json] | None = None) -> Json:
    try:
        return (how or _abbreviated)(value, depth)
    except Exception:  # noqa: BLE001 - a description is for reading: no odd __repr__ or property may stop a training
        return f"<{type(value).__name__}>"


def _abbreviated(value: Any, depth: int) -> Json:
    if type(value) in (type(None), bool, int, float):  # JSON readers take finite numbers and 64-bit integers
        return value if value is None or abs(value) < 1 << 63 else _shortened(repr(value))
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str | PurePath):
        return _shortened(str(value))
    if isinstance(value, types.FunctionType) and not is_named(value):
        return _source(value)
    if isinstance(value, type) or (hasattr(value, "__qualname__") and callable(value)):
        return f"{value.__module__}.{value.__qualname__}" if value.__module__ else str(value.__qualname__)
    return f"<{type(value).__name__}>" if depth >= _DEPTH else _compound(value, depth)


def _compound(value: Any, depth: int) -> Json:
    if isinstance(value, Mapping):
        pairs = {_shortened(str(key)): _brief(part, depth + 1) for key, part in list(value.items())[:_ITEMS]}
        return pairs if len(value) <= _ITEMS else {**pairs, "…": f"{len(value)} entries"}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [
            _brief(part, depth + 1)
            for part in (sorted(value, key=str) if isinstance(value, set | frozenset) else list(value))[:_ITEMS]
        ]
        return parts if len(value) <= _ITEMS else [*parts, f"… {len(value)} elements"]
    if hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist"):
        kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
        return f"{kind} {value.tolist()}" if np.prod(value.shape) <= _ITEMS else kind
    if callable(value) and _is_monai(value):
        return dict(_step(value, depth + 1))
    return _shortened(_ADDRESS.sub("", repr(value)))


def _source(function: types.FunctionType) -> str:
    node = function_node(function)
    return function.__qualname__ if node is None else _shortened(" ".join(ast.unparse(node).split()))


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"
