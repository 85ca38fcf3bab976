"""Whose code a module is, and what the source of modules says."""

import json
import sys

import numpy as np
import pytest
import yaml

from zcache.keys.modules import Import, absolute, changed, imported, is_library, sources, version


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path, from which modules may be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_absolute_names():
    assert absolute(0, "a.b", None) == "a.b"
    assert absolute(1, "b", "a") == "a.b"
    assert absolute(2, "b", "a.c") == "a.b"
    assert absolute(2, "b", "a") is None
    assert absolute(1, "b", "") is None


def test_modules_that_a_statement_runs(folder):
    (folder / "pkg").mkdir()
    write(folder, zc_one="", pkg__sub="")
    (folder / "pkg" / "__init__.py").touch()
    assert imported(Import(0, "pkg.sub", ()), None) == ["pkg", "pkg.sub"]
    assert imported(Import(0, "pkg", ("sub", "name")), None) == ["pkg", "pkg.sub"]
    assert imported(Import(1, "", ("sub",)), "pkg") == ["pkg", "pkg.sub"]
    assert imported(Import(0, "json", ("decoder",)), None) == ["json"]


def test_sources_of_all_that_is_imported_wherever_it_is(folder):
    write(
        folder,
        zc_one="import zc_two\n",
        zc_two="def f():\n    from zc_three import x\n    import numpy\n",
        zc_three="import zc_one, zc_gone\n",
    )
    found, libraries = sources(["zc_one"])
    assert {name: source is not None for name, source in found.items()} == {
        "zc_one": True,
        "zc_two": True,
        "zc_three": True,
        "zc_gone": False,
    }
    assert libraries == {"numpy"}
    assert not {"zc_one", "zc_two", "zc_three"} & set(sys.modules), "nothing was imported"


def test_comments_do_not_count_and_code_does(folder):
    digests = []
    for number, text in enumerate(("x = 1\n", "# one\n\nx  =  1\n", '"""One."""\nx: int = 1\n', "x = 2\n")):
        write(folder, **{f"zc_m{number}": text})
        digests.append(sources([f"zc_m{number}"])[0][f"zc_m{number}"].digest)
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_an_extension_module_counts_with_its_bytes(folder):
    path = folder / "zc_ext.abi3.so"
    path.write_bytes(b"\x7fELF one")
    first = sources(["zc_ext"])[0]["zc_ext"].digest
    path.write_bytes(b"\x7fELF three")
    assert sources(["zc_ext"])[0]["zc_ext"].digest != first


def test_what_is_loaded_stays_when_its_file_is_edited(folder):
    write(folder, zc_mod="x = 1\n")
    __import__("zc_mod")
    first = sources(["zc_mod"])[0]["zc_mod"]
    write(folder, zc_mod="x = 22\n")
    assert sources(["zc_mod"])[0]["zc_mod"] is first


def test_what_a_module_holds_in_place_of_its_source(folder):
    write(
        folder,
        zc_mod="X = 1\nY = [1, 2]\nZ = max(3, 4)\ndef f(): return 1\ndef g(): return 2\n"
        "class A:\n    def m(self): return 3\nclass B:\n    def m(self): return 4\n",
    )
    module = __import__("zc_mod")
    source = sources(["zc_mod"])[0]["zc_mod"]
    assert dict(changed("zc_mod", source)) == {}
    module.X, module.Z, module.f = 5, 9, max
    module.A.m = lambda _: 7
    module.Y.append(3)
    assert dict(changed("zc_mod", source)) == {"X": 5, "Y": [1, 2, 3], "f": max, "A": module.A}


def test_an_edit_after_the_import_is_told_by_what_runs(folder):
    write(folder, zc_mod="X = 1\ndef f(): return 1\n")
    module = __import__("zc_mod")
    write(folder, zc_mod="X = 2\ndef f(): return 22\n")
    source = sources(["zc_mod"])[0]["zc_mod"]
    assert dict(changed("zc_mod", source)) == {"X": 1, "f": module.f}


@pytest.mark.parametrize(
    ("note", "installer", "own"),
    [
        (None, "pip", False),
        ({"dir_info": {}}, "pip", True),
        ({"dir_info": {"editable": True}}, "uv", True),
        ({"vcs_info": {"vcs": "git"}}, "pip", True),
        ({"archive_info": {}}, "pip", False),
        ({"dir_info": {}}, "conda", False),
        ("no json", "pip", False),
    ],
)
def test_what_was_installed_from_a_folder_is_the_users(note, installer, own, folder, monkeypatch):
    site = folder / "site-packages"
    info = site / "zc_local-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "zc_local.py").write_text("")
    (info / "RECORD").write_text("zc_local.py,,\nzc_local-1.0.dist-info/RECORD,,\n../../bin/zc,,\n")
    (info / "INSTALLER").write_text(f"{installer}\n")
    if note is not None:
        (info / "direct_url.json").write_text(note if isinstance(note, str) else json.dumps({"url": "x"} | note))
    monkeypatch.syspath_prepend(site)
    __import__("zc_local")
    assert is_library("zc_local") != own


def test_versions():
    assert version("numpy") == np.__version__
    assert version("yaml") == yaml.__version__
    assert version("zc_no_such_thing") is None
