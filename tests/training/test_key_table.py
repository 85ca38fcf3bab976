"""What makes an item recomputed, and what does not: a table of edits and switches, each run in processes of its own.

A run computes one item through a data set and without any cache; both must be the same, or the cache was stale. Between
two runs something is changed. `RECOMPUTED` changes what the item is, or may; `SAME` must not cost anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.training.fresh import Fresh

NAMES = """
import argparse, functools, importlib, json, os, types, warnings
from os import environ
from pathlib import Path
import numpy as np
import torch
from monai.transforms import Lambdad, Transform
"""
# The item is 3,000 numbers, so that it is stored as an array; `pipeline` is what each case defines.
RUN = """
import json, warnings
warnings.simplefilter("ignore")
{before}
import torch
from monai.data import Dataset
from zcache import PersistentDataset
from pipe import data, pipeline
{after}
ds = PersistentDataset(data(), pipeline(), {cache!r}, {arguments})
{built}
item = ds[0]
plain = Dataset(data(), ds.transform)[0]
ds.close()
x, y = item["x"], plain["x"]
same = type(x) is type(y) and x.dtype == y.dtype and bool((x == y).all())
result = {{"misses": ds.stats.misses, "same": same, "value": float(x.reshape(-1)[0])}}
"""
ITEM = 'def data(): return [{"x": 2.0}]\n'
FULL = "torch.full((3000,), float({}))"


def lambdad(expression: str, before: str = "", *, inside: str = "") -> str:
    """Write a module whose pipeline applies one function."""
    body = "".join(f"    {line}\n" for line in inside.splitlines())
    function = f"def g(x):\n{body}    return {FULL.format(expression)}\n"
    return f"{NAMES}{before}\n{ITEM}\n{function}\ndef pipeline(): return [Lambdad('x', g)]\n"


@dataclass
class Case:
    """What lies in the folder, what is changed, and how the second run differs otherwise."""

    pipe: str
    files: dict[str, str] = field(default_factory=dict)
    edit: dict[str, str] | Callable[[Path], object] = field(default_factory=dict)
    env: tuple[dict[str, str], dict[str, str]] = ({}, {})
    before: tuple[str, str] = ("", "")  # run before the module is imported
    after: tuple[str, str] = ("", "")  # and after that
    built: tuple[str, str] = ("", "")  # after the data set was built
    arguments: str = ""
    cwd: tuple[str, str] = (".", ".")


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert text.count(old) >= 1
        (folder / name).write_text(text.replace(old, new))

    return edit


def twins(folder: Path, suffix: str = ".npy") -> None:
    """Make two files of different content with the same size and times, and a link to the folder of the first."""
    for number, value in enumerate("ab"):
        place = folder / f"v{number}"
        (place / "series").mkdir(parents=True)
        for file in (place / f"x{suffix}", place / "series" / "1.txt"):
            file.write_text(json.dumps([ord(value)] * 20))
            os.utime(file, ns=(1, 10**18))
    (folder / "current").symlink_to("v0")


def relink(folder: Path) -> None:
    (folder / "current").unlink()
    (folder / "current").symlink_to("v1")


READ = "json.loads(Path(x).read_text())[0]"
READ_FOLDER = "json.loads((Path(x) / '1.txt').read_text())[0]"
UTILX = {"utilx.py": "def f(x):\n    return x * 3\n"}
UTILX_EDIT = replaced("utilx.py", "x * 3", "x * 5")
HOLDER = """
class Holder(Transform):
    def __init__(self, path): self.path = path
    def __call__(self, d): return {"x": torch.full((3000,), d["x"] * float(Path(self.path).read_text()))}
"""
DISPATCH = """
@functools.singledispatch
def scaled(x): return x
@scaled.register
def _(x: float): return x * 3
"""
PACKAGE = {"pkg/__init__.py": "", "pkg/part.py": "def f(x): return x * 3\n", "pkg/pipe_in.py": ""}
WHEEL = {
    "site-packages/localpkg/__init__.py": "def f(x): return x * 3\n",
    "site-packages/localpkg-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: localpkg\nVersion: 1.0\n",
    "site-packages/localpkg-1.0.dist-info/RECORD": "localpkg/__init__.py,,\n",
    "site-packages/localpkg-1.0.dist-info/direct_url.json": '{"dir_info": {}, "url": "file:///home/me/localpkg"}',
}
INSTALLED = "import sys; sys.path.insert(0, 'site-packages')"
TYPED = "from __future__ import annotations\n"


RECOMPUTED = {
    # ---- imports where a function runs
    "from … import in a function": Case(lambdad("f(x)", inside="from utilx import f"), UTILX, UTILX_EDIT),
    "import in a function": Case(lambdad("u.f(x)", inside="import utilx as u"), UTILX, UTILX_EDIT),
    "import in a nested function": Case(
        lambdad("h(x)", inside="def h(y):\n    from utilx import f\n    return f(y)"), UTILX, UTILX_EDIT
    ),
    "import in a method": Case(
        f"{NAMES}{ITEM}class T(Transform):\n    def __call__(self, d):\n        from utilx import f\n"
        "        return {'x': torch.full((3000,), f(d['x']))}\ndef pipeline(): return [T()]\n",
        UTILX,
        UTILX_EDIT,
    ),
    "import in the function around a closure": Case(
        lambdad("made(x)", "def make():\n    import utilx\n    return lambda y: utilx.f(y)\nmade = make()\n"),
        UTILX,
        UTILX_EDIT,
    ),
    "relative import in a package": Case(
        f"{NAMES}{ITEM}from pkg.pipe_in import g\ndef pipeline(): return [Lambdad('x', g)]\n",
        PACKAGE
        | {"pkg/pipe_in.py": f"import torch\ndef g(x):\n    from .part import f\n    return {FULL.format('f(x)')}\n"},
        replaced("pkg/part.py", "x * 3", "x * 5"),
    ),
    "what the imported module imports": Case(
        lambdad("f(x)", inside="from utilx import f"),
        {"utilx.py": "from deeper import k\ndef f(x): return x * k\n", "deeper.py": "k = 3\n"},
        replaced("deeper.py", "3", "5"),
    ),
    "what a package re-exports": Case(
        lambdad("f(x)", inside="from pkg import f"),
        {"pkg/__init__.py": "from .part import f\n", "pkg/part.py": "def f(x): return x * 3\n"},
        replaced("pkg/part.py", "x * 3", "x * 5"),
    ),
    "import_module of a constant": Case(lambdad("importlib.import_module('utilx').f(x)"), UTILX, UTILX_EDIT),
    "__import__ of a constant": Case(lambdad("__import__('utilx').f(x)"), UTILX, UTILX_EDIT),
    "getattr on a module": Case(lambdad("getattr(utilx, 'f')(x)", "import utilx\n"), UTILX, UTILX_EDIT),
    "globals()": Case(
        lambdad("globals()['h'](x)", "def h(y): return y * 3\n"), edit=replaced("pipe.py", "y * 3", "y * 5")
    ),
    "a module-level constant set while the program runs": Case(
        lambdad("x * SCALE", inside="from utilx import SCALE"),
        {"utilx.py": "SCALE = 3\n"},
        after=("", "import utilx; utilx.SCALE = 5"),
    ),
    "a function replaced while the program runs": Case(
        lambdad("f(x)", inside="from utilx import f"), UTILX, after=("", "import utilx; utilx.f = lambda x: x * 7")
    ),
    "a package installed from a folder": Case(
        lambdad("f(x)", "from localpkg import f\n"),
        WHEEL,
        replaced("site-packages/localpkg/__init__.py", "x * 3", "x * 5"),
        before=(INSTALLED, INSTALLED),
    ),
    "an unrelated function of a module that a function imports": Case(  # coarse, and documented
        lambdad("f(x)", inside="from utilx import f"), UTILX, {"utilx.py": UTILX["utilx.py"] + "def h(): return 1\n"}
    ),
    # ---- files that transforms name
    "a file in an attribute": Case(
        f"{NAMES}{ITEM}{HOLDER}def pipeline(): return [Holder('scale.txt')]\n", {"scale.txt": "3"}, {"scale.txt": "15"}
    ),
    "a path in an attribute": Case(
        f"{NAMES}{ITEM}{HOLDER}def pipeline(): return [Holder(Path('scale.txt'))]\n",
        {"scale.txt": "3"},
        {"scale.txt": "15"},
    ),
    "a file of the same size, modified": Case(
        f"{NAMES}{ITEM}{HOLDER}def pipeline(): return [Holder(os.path.abspath('scale.txt'))]\n",
        {"scale.txt": "3"},
        {"scale.txt": "5"},
    ),
    "a file in a global variable": Case(
        lambdad("x * float(Path(FILE).read_text())", "FILE = 'scale.txt'\n"), {"scale.txt": "3"}, {"scale.txt": "15"}
    ),
    "a file in a constant": Case(lambdad("x * float(open('./scale').read())"), {"scale": "3"}, {"scale": "15"}),
    "a file in a default": Case(
        lambdad("h(x)", "def h(y, file='scale.txt'): return y * float(Path(file).read_text())\n"),
        {"scale.txt": "3"},
        {"scale.txt": "15"},
    ),
    "a file that a module names which a function imports": Case(
        lambdad("f(x)", inside="from utilx import f"),
        {"utilx.py": "def f(x): return x * float(open('scale.txt').read())\n", "scale.txt": "3"},
        {"scale.txt": "15"},
    ),
    # ---- which file a path means
    "a relative path in another working directory": Case(
        lambdad(READ).replace('"x": 2.0', '"x": "x.npy"'), edit=lambda _: None, cwd=("v0", "v1")
    ),
    "a relative path of a transform in another working directory": Case(
        f"{NAMES}{ITEM}class Holder(Transform):\n    def __init__(self): self.path = 'x.npy'\n"
        "    def __call__(self, d):\n        value = json.loads(Path(self.path).read_text())[0]\n"
        "        return {'x': torch.full((3000,), float(value))}\n"
        "def pipeline(): return [Holder()]\n",
        cwd=("v0", "v1"),
    ),
    "a link that leads elsewhere": Case(
        lambdad(READ).replace('"x": 2.0', '"x": os.path.join(HERE, "current", "x.npy")'), edit=relink
    ),
    "a link below the root": Case(
        lambdad(READ).replace('"x": 2.0', '"x": os.path.join(HERE, "current", "x.npy")'),
        edit=relink,
        arguments="root='.'",
    ),
    "the root is a link": Case(
        lambdad(READ).replace('"x": 2.0', '"x": os.path.join(HERE, "current", "x.npy")'),
        edit=relink,
        arguments="root='current'",
    ),
    "a folder behind a link": Case(
        lambdad(READ_FOLDER).replace('"x": 2.0', '"x": os.path.join(HERE, "current", "series")'), edit=relink
    ),
    "str and Path": Case(  # the item may come back with it
        lambdad(READ).replace('"x": 2.0', '"x": os.path.join(HERE, "v0", "x.npy")'),
        edit=replaced("pipe.py", 'os.path.join(HERE, "v0", "x.npy")', 'Path(HERE, "v0", "x.npy")'),
    ),
    # ---- switches of the process
    "set_track_meta": Case(
        f"{NAMES}from monai.data import MetaTensor, get_track_meta\n{ITEM}"
        "class T(Transform):\n    def __call__(self, d):\n        t = torch.full((3000,), d['x'])\n"
        "        return {'x': MetaTensor(t) if get_track_meta() else t}\ndef pipeline(): return [T()]\n",
        before=("", "import monai.data; monai.data.set_track_meta(False)"),
    ),
    "default dtype": Case(lambdad("x"), before=("", "import torch; torch.set_default_dtype(torch.float64)")),
    "default device": Case(lambdad("x"), before=("", "import torch; torch.set_default_device('cpu:0')")),
    "autocast": Case(
        lambdad("(torch.ones(1, 1) * (1 + 2**-12)) @ torch.ones(1, 1)"),
        after=("", "torch.autocast('cpu', dtype=torch.bfloat16).__enter__()"),
    ),
    "precision of matrix products": Case(
        lambdad("x"), before=("", "import torch; torch.set_float32_matmul_precision('medium')")
    ),
    "USE_META_DICT": Case(lambdad("x"), before=("", "import monai.config; monai.config.USE_META_DICT = True")),
    "MONAI_TRACE_TRANSFORM": Case(lambdad("x"), env=({}, {"MONAI_TRACE_TRANSFORM": "0"})),
    "MONAI_DICOM_READER": Case(lambdad("x"), env=({}, {"MONAI_DICOM_READER": "pydicom"})),
    # ---- environment variables
    "os.environ[…]": Case(lambdad("x * float(os.environ['K'])"), env=({"K": "3"}, {"K": "5"})),
    "os.getenv": Case(lambdad("x * float(os.getenv('K', '3'))"), env=({}, {"K": "5"})),
    "environ.get": Case(lambdad("x * float(environ.get('K', 3))"), env=({}, {"K": "5"})),
    "… in os.environ": Case(lambdad("x * (3 if 'K' in os.environ else 5)"), env=({}, {"K": ""})),
    "os imported where it runs": Case(
        lambdad("x * float(os.environ['K'])", inside="import os"), env=({"K": "3"}, {"K": "5"})
    ),
    "a name in a variable": Case(lambdad("x * float(os.environ[NAME])", "NAME = 'K'\n"), env=({"K": "3"}, {"K": "5"})),
    "in a module that a function imports": Case(
        lambdad("f(x)", inside="from utilx import f"),
        {"utilx.py": "from os import getenv as g\ndef f(x): return x * float(g('K'))\n"},
        env=({"K": "3"}, {"K": "5"}),
    ),
    # ---- values and code
    "singledispatch": Case(lambdad("scaled(x)", DISPATCH), edit=replaced("pipe.py", "x * 3", "x * 5")),
    "torch.jit.script": Case(
        lambdad("scripted(torch.ones(1))", "import scripts; scripted = scripts.make()\n"),
        {"scripts.py": "import torch\ndef f(x): return x * 3\ndef make(): return torch.jit.script(f)\n"},
        replaced("scripts.py", "x * 3", "x * 5"),
    ),
    "a key of a dictionary": Case(
        lambdad("x * CONFIG['scale']", "CONFIG = {'scale': 3, 'other': 1}\n"),
        edit=replaced("pipe.py", "'scale': 3", "'scale': 5"),
    ),
    "a dictionary that is used whole": Case(
        lambdad("x * sum(CONFIG.values()) + CONFIG['scale']", "CONFIG = {'scale': 3, 'other': 1}\n"),
        edit=replaced("pipe.py", "'other': 1", "'other': 5"),
    ),
    "an attribute of a namespace": Case(
        lambdad("x * ARGS.scale", "ARGS = argparse.Namespace(scale=3, epochs=1)\n"),
        edit=replaced("pipe.py", "scale=3", "scale=5"),
    ),
    "an attribute of a module": Case(
        lambdad("x * utilx.SCALE", "import utilx\n"), {"utilx.py": "SCALE = 3\n"}, {"utilx.py": "SCALE = 5\n"}
    ),
    "annotations that a decorator reads": Case(
        lambdad(
            "wide(x)", "def cast(f): return lambda x: f.__annotations__['x'](x)\n@cast\ndef wide(x: float): return x\n"
        ),
        edit=replaced("pipe.py", "x: float", "x: int"),
    ),
    "an attribute set after the data set was built": Case(
        f"{NAMES}{ITEM}class T(Transform):\n    scale = 3\n"
        "    def __call__(self, d): return {'x': torch.full((3000,), d['x'] * self.scale)}\n"
        "def pipeline(): return [T()]\n",
        built=("", "ds.transform.transforms[0].scale = 5; ds.data = [{'x': 2.0, 'more': 1}]"),
    ),
    "another version, where it counts": Case(
        lambdad("x"), after=("", "import numpy; numpy.__version__ = '1.0.0'"), arguments="version_in_key=True"
    ),
    "a renamed local variable, where source is compared": Case(
        lambdad("one_name", inside="one_name = x"), edit=replaced("pipe.py", "one_name", "another")
    ),
}
SAME = {
    "nothing": Case(lambdad("x * 3"), edit=lambda _: None),
    "a comment": Case(lambdad("x * 3"), edit=replaced("pipe.py", "def g(x):", "# so it is\ndef g(x):  # times three")),
    "a docstring": Case(lambdad("x * 3"), edit=replaced("pipe.py", "def g(x):", "def g(x):\n    'Times three.'")),
    "blank lines": Case(lambdad("x * 3"), edit=replaced("pipe.py", "def g(x):", "\n\n\ndef g(x):\n\n")),
    "annotations": Case(
        lambdad("y * 3", inside="y = x"),
        edit=lambda folder: (
            replaced("pipe.py", "def g(x):", "def g(x: float) -> torch.Tensor:")(folder),
            replaced("pipe.py", "    y = x", "    y: float = x")(folder),
        ),
    ),
    "a comment in a module that a function imports": Case(
        lambdad("f(x)", inside="from utilx import f"), UTILX, replaced("utilx.py", "def f(x):", "def f(x):  # so\n")
    ),
    "an import that has run before": Case(
        lambdad("f(x)", inside="from utilx import f"), UTILX, edit=lambda _: None, before=("", "import utilx")
    ),
    "a function of a module that is not used": Case(
        lambdad("utilx.f(x)", "import utilx\n"), UTILX, {"utilx.py": UTILX["utilx.py"] + "def h(): return 1\n"}
    ),
    "a function that moves to another module": Case(
        f"{NAMES}{ITEM}from one import g\ndef pipeline(): return [Lambdad('x', g)]\n",
        {name: f"import torch\ndef g(x): return {FULL.format('x')}\n" for name in ("one.py", "two.py")},
        replaced("pipe.py", "from one", "from two"),
    ),
    "a variable of the environment that is not read": Case(
        lambdad("x * float(environ.get('K', 3))"), env=({"JOB": "1"}, {"JOB": "2"})
    ),
    "a key of a dictionary that is not read": Case(
        lambdad("x * CONFIG['scale']", "CONFIG = {'scale': 3, 'other': 1}\n"),
        edit=replaced("pipe.py", "'other': 1", "'other': 5"),
    ),
    "an attribute of a namespace that is not read": Case(
        lambdad("x * ARGS.scale", "ARGS = argparse.Namespace(scale=3, epochs=1)\n"),
        edit=replaced("pipe.py", "epochs=1", "epochs=9"),
    ),
    "another version": Case(lambdad("x"), after=("", "import numpy; numpy.__version__ = '2.0.0'")),
    "switches that stand at their defaults": Case(
        lambdad("x"),
        before=(
            "",
            "import torch; torch.set_default_dtype(torch.float32); torch.set_float32_matmul_precision('highest')",
        ),
    ),
    "determinism": Case(lambdad("x"), before=("", "from monai.utils import set_determinism; set_determinism(3)")),
    "an absolute path in another working directory": Case(
        lambdad(READ).replace('"x": 2.0', '"x": os.path.join(HERE, "v0", "x.npy")'), cwd=(".", "v1")
    ),
    "a relative path below the root, by another text": Case(
        lambdad(READ).replace('"x": 2.0', '"x": os.path.relpath(os.path.join(HERE, "v0", "x.npy"))'),
        cwd=(".", "v1"),
        arguments="root={here!r}",
    ),
    "a use of singledispatch": Case(lambdad("scaled(x)", DISPATCH), after=("", "import pipe; pipe.scaled('text')")),
    "a file that transforms name, read": Case(
        f"{NAMES}{ITEM}{HOLDER}def pipeline(): return [Holder('scale.txt')]\n",
        {"scale.txt": "3"},
        lambda folder: os.utime(folder / "scale.txt", ns=(5, (folder / "scale.txt").stat().st_mtime_ns)),
    ),
    "a transform that notes down how often it ran": Case(
        f"{NAMES}{ITEM}class T(Transform):\n    def __init__(self): self.calls = 0\n"
        "    def __call__(self, d):\n        self.calls += 1\n        return {'x': torch.full((3000,), d['x'])}\n"
        "def pipeline(): return [T()]\n",
        edit=lambda _: None,
    ),
}


@pytest.fixture(scope="module")
def fresh():
    servers = [Fresh("1"), Fresh("2")]  # sets are ordered differently in the second run
    yield servers
    for server in servers:
        server.close()


def run_twice(case: Case, folder: Path, fresh) -> list[dict]:
    folder = folder / "work"
    folder.mkdir()
    twins(folder)
    for name, text in {**case.files, "pipe.py": f"HERE = {str(folder)!r}\n{case.pipe}"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    results = []
    for turn, server in enumerate(fresh):
        if turn and callable(case.edit):
            case.edit(folder)
        elif turn:
            for name, text in case.edit.items():
                (folder / name).write_text(text)
        code = RUN.format(
            before=f"import sys; sys.path.insert(0, {str(folder)!r})\n{case.before[turn]}",
            after=case.after[turn],
            built=case.built[turn],
            cache=str(folder.parent / "cache"),
            arguments=case.arguments.format(here=str(folder)),
        )
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # an edit within a second, of the same size
        results.append(server.run(code, cwd=folder / case.cwd[turn], env=case.env[turn]))
    return results


@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_recomputed(name, tmp_path, fresh):
    first, second = run_twice(RECOMPUTED[name], tmp_path, fresh)
    assert first["same"]
    assert second["same"], f"stale: {second['value']}"
    assert (first["misses"], second["misses"]) == (1, 1)


@pytest.mark.parametrize("name", SAME)
def test_what_is_not(name, tmp_path, fresh):
    first, second = run_twice(SAME[name], tmp_path, fresh)
    assert first["same"]
    assert second["same"]
    assert (first["misses"], second["misses"]) == (1, 0)
