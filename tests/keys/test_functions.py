"""The source of functions: found, normalised, and trusted only if it is what runs."""

import ast
import linecache

import pytest

from zcache.keys.functions import code_digest, function_node, normalised, place


def defined(text, filename=None):
    namespace = {"__name__": "__main__"}
    if filename is not None:
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename or "<string>", "exec"), namespace)
    return namespace["f"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x+1", "(x  +  1)  # note", True),
        ("'a'", '"a"', True),
        ("u'a'", "'a'", True),
        ("1", "1.0", False),
        ("1", "True", False),
        ("'1'", "b'1'", False),
        ("0.0", "-0.0", False),
        ("x[:1]", "x[1:]", False),
        ("{**a}", "{'a': a}", False),
        ("f'{x:.2f}'", "f'{x:.3f}'", False),
    ],
)
def test_normalised(one, other, same):
    forms = [normalised(ast.parse(text, mode="eval")) for text in (one, other)]
    assert (forms[0] == forms[1]) == same


def test_normalised_is_ascii():
    assert ascii(normalised(ast.parse("'é' + '\u2603'"))) == str(normalised(ast.parse("'é' + '\u2603'")))


def test_source_of_a_decorated_and_of_an_async_function():
    decorated = defined("def d(g): return g\n@d\n@d\ndef f(x):\n    return x\n", "<cell decorated>")
    assert isinstance(function_node(decorated), ast.FunctionDef)
    assert isinstance(function_node(defined("async def f(x): return x\n", "<cell async>")), ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    "registered",
    ["def f(x): return x + 2\n", "def g(x): return x + 1\n", "not python ][", "\0", "", "\ndef f(x): return x + 1\n"],
)
def test_case_29_source_that_is_not_what_runs_is_not_used(registered):
    f = defined("def f(x): return x + 1\n", "<cell stale>")
    digest = code_digest(f)
    assert digest.startswith("source:")
    linecache.cache["<cell stale>"] = (1, None, registered.splitlines(keepends=True), "<cell stale>")
    assert function_node(f) is None
    assert code_digest(f) == digest, "what runs is the same as before the edit"
    assert place(digest) == "f, <cell stale>:1"
    later = {}
    exec(compile("\n\ndef f(x): return x + 1\n", "<cell stale>", "exec"), later)
    assert code_digest(later["f"]).startswith("bytecode:")


def test_case_29_a_cell_after_one_with_future_annotations():
    text = "def f(x: int): return x\n"
    linecache.cache["<cell future>"] = (len(text), None, [text], "<cell future>")
    namespace = {}
    exec(compile("from __future__ import annotations\n" + text, "<other>", "exec"), namespace)
    flags = namespace["f"].__code__.co_flags & 0x1000000
    exec(compile(text, "<cell future>", "exec", flags=flags), namespace)
    assert code_digest(namespace["f"]).startswith("source:")
