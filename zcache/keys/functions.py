"""What a Python function says: its normalised source, else its byte code.

A function is identified by the syntax tree of its own source, so that comments, layout and the position in the file
do not matter. The tree is trusted only when compiling the file again gives the very code object that runs: a file that
was edited after its import, or rewritten by a test runner, is not what runs, and then the byte code speaks.
"""

from __future__ import annotations
import __future__

import ast
import linecache
from functools import lru_cache
from hashlib import blake2b
from types import CodeType
from typing import TYPE_CHECKING, Any

from zcache.keys.scan import nested_codes

if TYPE_CHECKING:
    from types import FunctionType

__all__ = ["code_digest", "function_node", "normalised", "place"]

_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# Fields without influence on what the code does.
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind"})
# In force for a notebook cell that follows one with `from __future__ import annotations`, though it is not in its text.
_FUTURE_FLAGS = __future__.annotations.compiler_flag

_known: dict[tuple[CodeType, str], str] = {}
_places: dict[str, str] = {}


def function_node(function: FunctionType) -> _Node | None:
    """Find the syntax tree node of a function or lambda.

    Parameters
    ----------
    function : FunctionType
        A function written in Python.

    Returns
    -------
    ast.FunctionDef or ast.AsyncFunctionDef or ast.Lambda or None
        The node, or None where the source is not available or is not what runs.

    Examples
    --------
    >>> import textwrap
    >>> type(function_node(textwrap.dedent)).__name__
    'FunctionDef'
    """
    code = function.__code__
    for attempt in range(2):
        if attempt:  # the lines may be an older version of a file that has been reloaded since
            linecache.checkcache(code.co_filename)
        source = "".join(linecache.getlines(code.co_filename, function.__globals__))
        nodes, codes = _parsed(source, code.co_flags & _FUTURE_FLAGS)
        if code in codes:
            return _select(nodes.get(code.co_firstlineno, ()), code)
    return None


def code_digest(function: FunctionType) -> str:
    """Identify what a function does by a hash of its normalised source, else of its byte code.

    Parameters
    ----------
    function : FunctionType
        A function written in Python.

    Returns
    -------
    str
        ``"source:"`` or ``"bytecode:"`` and 32 hexadecimal digits. The first is the same for every Python version.

    Examples
    --------
    >>> import textwrap
    >>> code_digest(textwrap.dedent)[:7]
    'source:'
    >>> namespace = {}
    >>> exec("def double(x): return 2 * x", namespace)
    >>> code_digest(namespace["double"])[:9]
    'bytecode:'
    """
    code = function.__code__
    known = _known.get((code, code.co_filename))
    if known is None:
        node = function_node(function)
        kind, form = ("bytecode", _code_form(code)) if node is None else ("source", normalised(node))
        # Once and for all: the file may be edited while the program runs, what runs stays as it is.
        known = _known[code, code.co_filename] = (
            f"{kind}:{blake2b(ascii(form).encode('ascii'), digest_size=16).hexdigest()}"
        )
        _places[known] = f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"
    return known


def place(digest: str) -> str:
    """Say where the function stands that this process knows by a `code_digest`; an empty string if it knows none."""
    return _places.get(digest, "")


def normalised(node: object) -> Any:
    """Turn a syntax tree into nested tuples without positions, docstrings and empty fields.

    `ast.dump` would do, but its output differs between Python versions. Annotations are left out, but those of classes
    and of decorated functions: `dataclass` and its like read them, nothing else does.

    Parameters
    ----------
    node : object
        A node, a list of nodes, or a constant.

    Returns
    -------
    object
        Nested tuples of strings and None.

    Examples
    --------
    >>> normalised(ast.parse("x  # a comment", mode="eval").body)
    ('Name', ('id', ('str', "'x'")))
    """
    return _normalised(node, annotated=False)


def _normalised(node: object, *, annotated: bool) -> Any:
    """Do the work of `normalised`; annotations count where a decorator, or a class, may read them."""
    if isinstance(node, list):
        return tuple(
            _normalised(child, annotated=annotated)
            for child in node
            if annotated or not isinstance(child, ast.AnnAssign) or child.value is not None
        )
    if not isinstance(node, ast.AST):
        # A frozenset cannot occur in a parsed tree, so this is stable; `repr` would vary with Python's Unicode tables.
        return (type(node).__name__, ascii(node))
    if isinstance(node, ast.AnnAssign) and not annotated and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    is_function = False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        is_function, annotated = True, bool(node.decorator_list)
    elif isinstance(node, ast.ClassDef | ast.Lambda | ast.Module):
        annotated = isinstance(node, ast.ClassDef)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS or (value is None and not isinstance(node, ast.Constant)) or value == []:
            continue
        if name in {"returns", "annotation"} and not annotated:
            continue
        kept, inner = value, annotated
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            kept = value[1:] if _is_docstring(value[0]) else value
            inner = annotated and not is_function  # those of local variables are not even evaluated
        fields.append((name, _normalised(kept, annotated=inner)))
    return (type(node).__name__, *fields)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@lru_cache(maxsize=64)
def _parsed(source: str, flags: int) -> tuple[dict[int, list[_Node]], frozenset[CodeType]]:
    """Parse one file: its function nodes by first line, and every code object that compiling it gives."""
    nodes: dict[int, list[_Node]] = {}
    try:
        tree = ast.parse(source)
        codes = frozenset(nested_codes(compile(source, "<source>", "exec", flags=flags, dont_inherit=True)))
    except (SyntaxError, ValueError):  # not Python (a template, a notebook's magic), or NUL bytes in it
        return {}, frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            nodes.setdefault(first, []).append(node)
        elif isinstance(node, ast.Lambda):
            nodes.setdefault(node.lineno, []).append(node)
    return nodes, codes


def _select(nodes: list[_Node] | tuple[()], code: CodeType) -> _Node | None:
    """Choose the node of this code among those that begin on its first line."""
    if code.co_name != "<lambda>":
        named = [node for node in nodes if not isinstance(node, ast.Lambda) and node.name == code.co_name]
        return named[0] if len(named) == 1 else None
    # Several lambdas may begin on one line, nested ones too: ours is the one with the smallest body that holds every
    # instruction. The entry and exit instructions have an empty column range and say nothing.
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for line, end_line, column, end_column in code.co_positions():
        if line is not None and end_line is not None and (column, end_column) != (0, 0):
            if column is None or end_column is None:  # python -X no_debug_ranges
                spans = []
                break
            spans.append(((line, column), (end_line, end_column)))
    lambdas = [node for node in nodes if isinstance(node, ast.Lambda)]
    if not spans:
        return lambdas[0] if len(lambdas) == 1 else None
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    holding = [node for node in lambdas if _body_span(node)[0] <= first and last <= _body_span(node)[1]]
    return max(holding, key=lambda node: _body_span(node)[0], default=None)  # of nested ranges, the last to begin


def _body_span(node: ast.Lambda) -> tuple[tuple[int, int], tuple[int, int]]:
    body = node.body
    return (body.lineno, body.col_offset), (body.end_lineno or body.lineno, body.end_col_offset or body.col_offset)


def _code_form(code: CodeType) -> Any:
    """Describe byte code without its position: stable for one Python version, which is all that can be had."""
    return (
        code.co_code.hex(),
        tuple(_constant_form(constant) for constant in code.co_consts),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_exceptiontable.hex(),
    )


def _constant_form(constant: object) -> Any:
    if isinstance(constant, CodeType):
        return _code_form(constant)
    if isinstance(constant, tuple):
        return ("tuple", *(_constant_form(item) for item in constant))
    if isinstance(constant, frozenset):  # its order changes with PYTHONHASHSEED
        return ("frozenset", *sorted(repr(_constant_form(item)) for item in constant))
    return (type(constant).__name__, ascii(constant))
