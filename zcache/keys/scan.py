"""What a code object reaches for by name: globals with their attributes, imports, and the text that it holds.

Read off the byte code, which is there for every function, its source or not; the functions nested in it are looked
through as well. Nothing is imported and nothing is run.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

__all__ = ["Import", "Load", "Reach", "nested_codes", "scan"]

_SILENT = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "free"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), "attribute"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), "constant"),
    **dict.fromkeys(("STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"), "store"),
    **dict.fromkeys(("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"), "subscript"),
}


class Load(NamedTuple):
    """A name that is looked up, what is read right from it, and with which operand.

    Attributes
    ----------
    chain : tuple of str
        The name and the attributes behind it: ``("os", "environ", "get")``.
    text : str or None
        The constant that the subscript or the first argument of the call is: ``"HOME"``.
    variable : str or None
        The global variable that it is.
    how : "subscript", "in" or "call"
        What is done with it: ``mapping["HOME"]``, ``"HOME" in mapping``, or anything else, mostly a call.
    """

    chain: tuple[str, ...]
    text: str | None = None
    variable: str | None = None
    how: str = "call"


class Import(NamedTuple):
    """An import statement: ``from .pkg import a, b`` is ``(1, "pkg", ("a", "b"))``, ``import os`` ``(0, "os", ())``."""

    level: int
    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """What code reaches for; each tuple sorted and without repetition.

    Attributes
    ----------
    globals : tuple of Load
        What is looked up in the namespace of the module, or among the built-in names.
    free : tuple of Load
        What is looked up among the variables of the functions around it.
    imported : tuple of Load
        What is looked up under names that the code itself imports, under their full names: ``("os", "getenv")``.
    imports : tuple of Import
        Its import statements.
    strings : tuple of str
        Its text constants.
    """

    globals: tuple[Load, ...]
    free: tuple[Load, ...]
    imported: tuple[Load, ...]
    imports: tuple[Import, ...]
    strings: tuple[str, ...]


@lru_cache(maxsize=4096)
def scan(code: CodeType) -> Reach:
    """Find out what a code object and those nested in it reach for.

    Parameters
    ----------
    code : CodeType
        The code of a function or of a module.

    Returns
    -------
    Reach
        Over-complete rather than incomplete: what is in branches that are never taken counts, too.

    Examples
    --------
    >>> import math
    >>> def area(radius): return math.pi * abs(radius) ** 2
    >>> [load.chain for load in scan(area.__code__).globals]
    [('abs',), ('math', 'pi')]
    """
    codes = list(nested_codes(code))
    steps = {nested: list(_steps(nested)) for nested in codes}
    bound: dict[str, tuple[str, ...]] = {}
    imports: set[Import] = set()
    for nested in codes:
        imports.update(_imports(steps[nested], bound))
    found = {load for nested in codes for load in _loads(steps[nested])}
    strings = {text for nested in codes for constant in nested.co_consts for text in _texts(constant)}
    return Reach(
        _sorted(load for kind, load in found if kind == "global"),
        _sorted(load for kind, load in found if kind == "free"),
        _sorted(
            load._replace(chain=bound[load.chain[0]] + load.chain[1:]) for _, load in found if load.chain[0] in bound
        ),
        tuple(sorted(imports)),
        tuple(sorted(strings)),
    )


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


def _sorted(loads: Iterable[Load]) -> tuple[Load, ...]:
    return tuple(sorted(set(loads), key=repr))


def _texts(constant: object) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | frozenset):
        for part in constant:
            yield from _texts(part)


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield what the instructions do, alike for all versions of Python."""
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name.startswith(("LOAD_FAST", "STORE_FAST")):  # newer versions do two at once
            kinds = [part for part in name.split("_") if part in {"LOAD", "STORE"}]
            for kind, variable in zip(kinds, value if isinstance(value, tuple) else (value,), strict=True):
                yield ("local" if kind == "LOAD" else "store"), variable
        elif name == "BINARY_OP" and instruction.argrepr == "[]":
            yield "subscript", None
        elif name not in _SILENT:
            yield _KINDS.get(name, name), value


def _imports(steps: list[tuple[str, Any]], bound: dict[str, tuple[str, ...]]) -> Iterator[Import]:
    """Yield the import statements, and note which names they bind to what."""
    for index, (kind, name) in enumerate(steps):
        if kind != "IMPORT_NAME":
            continue
        level, names = steps[index - 2][1], steps[index - 1][1] or ()
        yield Import(level, name, tuple(names))
        module = ("." * level + name,) if level else tuple(name.split("."))
        value = module if names else module[:1]
        for following, argument in steps[index + 1 :]:
            if following == "IMPORT_FROM":
                value = (*module, argument) if names else module  # `import a.b as c` asks a for b
            elif following == "store":
                bound[argument] = value
                if not names:
                    break
            elif following not in {"SWAP", "POP_TOP"}:
                break


def _loads(steps: list[tuple[str, Any]]) -> Iterator[tuple[str, Load]]:
    """Yield what is looked up, and where."""
    for index, (kind, name) in enumerate(steps):
        if kind not in {"global", "free", "local"}:
            continue
        end = index + 1
        while end < len(steps) and steps[end][0] == "attribute":
            end += 1
        chain = (name, *(attribute for _, attribute in steps[index + 1 : end]))
        behind = steps[end : end + 2]
        how = "subscript" if len(behind) > 1 and behind[1][0] == "subscript" else "call"
        operand = behind[0] if behind else ("", None)
        if operand[0] == "CONTAINS_OP":  # what is looked for comes before
            how, operand = "in", steps[index - 1] if index else ("", None)
        text = operand[1] if operand[0] == "constant" and isinstance(operand[1], str) else None
        variable = operand[1] if operand[0] == "global" else None
        yield kind, Load(chain, text, variable, how)
