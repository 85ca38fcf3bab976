"""What code reaches for: names, imports, text."""

import pytest

from zcache.keys.scan import Import, Load, scan


def code(body, argument="x"):
    namespace = {}
    exec(f"def f({argument}):\n" + "".join(f"    {line}\n" for line in body.splitlines()), namespace)
    return namespace["f"].__code__


def test_chains_of_nested_functions():
    reach = scan(code("def g(): return a.b.c(x)\nreturn [h.i for _ in x] + [j, x.k]"))
    assert [load.chain for load in reach.globals] == [("a", "b", "c"), ("h", "i"), ("j",)]


@pytest.mark.parametrize(
    ("expression", "load"),
    [
        ("c['k']", Load(("c",), "k", None, "subscript")),
        ("c.d['k']", Load(("c", "d"), "k", None, "subscript")),
        ("c[n]", Load(("c",), None, "n", "subscript")),
        ("c[x]", Load(("c",), None, None, "subscript")),
        ("c[0]", Load(("c",), None, None, "subscript")),
        ("'k' in c", Load(("c",), "k", None, "in")),
        ("'k' not in c", Load(("c",), "k", None, "in")),
        ("c('k')", Load(("c",), "k", None, "call")),
        ("c.get('k', 1)", Load(("c", "get"), "k", None, "call")),
        ("c.get(n)", Load(("c", "get"), None, "n", "call")),
        ("c", Load(("c",))),
    ],
)
def test_operands(expression, load):
    assert load in scan(code(f"return {expression}")).globals


@pytest.mark.parametrize(
    ("statement", "imported", "bound"),
    [
        ("import a", Import(0, "a", ()), {"a": ("a",)}),
        ("import a.b", Import(0, "a.b", ()), {"a": ("a",)}),
        ("import a.b as c", Import(0, "a.b", ()), {"c": ("a", "b")}),
        ("import a.b.d as c", Import(0, "a.b.d", ()), {"c": ("a", "b", "d")}),
        ("from a import b", Import(0, "a", ("b",)), {"b": ("a", "b")}),
        ("from a.b import c as d, e", Import(0, "a.b", ("c", "e")), {"d": ("a", "b", "c"), "e": ("a", "b", "e")}),
        ("from . import b", Import(1, "", ("b",)), {"b": (".", "b")}),
        ("from ..a import b", Import(2, "a", ("b",)), {"b": ("..a", "b")}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_imports(statement, imported, bound, nested):
    uses = "; ".join(f"{name}.z" for name in bound)
    body = f"{statement}\ndef g(): {uses}" if nested else f"{statement}\n{uses}"
    reach = scan(code(body))
    assert reach.imports == (imported,)
    assert {load.chain for load in reach.imported} == {(*chain, "z") for chain in bound.values()}
    assert reach.globals == ()


def test_a_name_that_one_function_imports_is_a_global_of_another():
    reach = scan(code("def g():\n    import a\ndef h(): return a.b"))
    assert [load.chain for load in reach.globals] == [("a", "b")]


def test_variables_of_the_function_around():
    namespace = {}
    exec("def make(a):\n    return lambda x: a.b(x) + a['k']", namespace)
    inner = scan(namespace["make"](None).__code__)
    assert inner.free == (Load(("a", "b")), Load(("a",), "k", None, "subscript"))
    assert inner.globals == ()


def test_strings_in_nested_constants():
    assert {"a", "b", "c"} <= set(scan(code("return x in ('a', 'b'), lambda: 'c'")).strings)
    assert {"d", "e"} <= set(scan(code("return x in {'d', 'e'}")).strings)


def test_the_code_of_a_module():
    reach = scan(compile("import os\nfrom m import f\nX = os.environ['K']\ndef g(): return f(X)", "m", "exec"))
    assert Load(("os", "environ"), "K", None, "subscript") in reach.imported
    assert {load.chain for load in reach.imported} == {("os", "environ"), ("m", "f")}
