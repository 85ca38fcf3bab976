"""What is published: the name everywhere, the files and the metadata of both distributions."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import zcache
from tests.support import REPOSITORY
from zcache.errors import DISTRIBUTION

OLD = "zcache"
OLD_FORM = re.compile(
    rf"""\b(pip3?|uv|pipx)\ (install|add)\ [^\n#`]*(?<![\w./-]){OLD}(?![\w./-])  # a command
    |(?<![\w./-]){OLD}\[[\w,-]+\]                                              # a requirement with extras
    |["']{OLD}\ ?([<>=!~]=?|@)                                                 # a requirement with a version
    |\b(version|metadata|distribution|requires|files)\(["']{OLD}["']           # of importlib.metadata
    |^name\ =\ ["']{OLD}["']""",
    re.VERBOSE | re.MULTILINE,
)
TEXTS = (".py", ".md", ".toml", ".ipynb", ".txt", ".yml", ".in", "Makefile", ".ci/run")
RELATIVE_LINK = re.compile(r"\]\((?!https?:)")
CLUTTER = [".venv/a.py", "benchmarks/results/a.json", "tests/viewers/node_modules/a/a.js", "tests/__pycache__/a.pyc"]


def git_files() -> list[str]:
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no checkout, or there is no git: nobody says which files belong to the project")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (REPOSITORY / name).is_file()]


@pytest.mark.parametrize(
    "text",
    [
        f"pip install {OLD}",
        f"pip install -U '{OLD}'",
        f"pip install '{OLD}[inspect]'",
        f"uv add torch {OLD}",
        f'"{OLD}[demo,bench]"',
        f'"{OLD}>=0.1"',
        f"version('{OLD}')",
        f'[project]\nname = "{OLD}"',
    ],
)
def test_the_old_name_is_recognised(text):
    assert OLD_FORM.search(text)
    assert not OLD_FORM.search(text.replace(OLD, DISTRIBUTION))


def test_nothing_says_the_old_name():
    texts = {name: (REPOSITORY / name).read_text("utf-8") for name in git_files() if name.endswith(TEXTS)}
    assert [f"{name}: {match[0].strip()}" for name, text in texts.items() for match in OLD_FORM.finditer(text)] == []


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution of a working tree with the clutter that one has, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("distributions")
    for name in git_files():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, target)
    for name in CLUTTER:
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    sdist = build("build_sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def build(what: str, tree: Path, target: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; sys.stderr.write(build_meta.{what}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stderr.splitlines()[-1]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode("utf-8"))


def test_the_source_distribution_holds_the_project(distributions):
    sdist, _ = distributions
    top = f"monai_zcache-{zcache.__version__}"
    assert sdist.name == f"{top}.tar.gz"
    with tarfile.open(sdist) as archive:
        held = {member.name.removeprefix(f"{top}/") for member in archive if member.isfile()}
    made = {name for name in held if name.startswith("monai_zcache.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - made == set(git_files())


def test_the_wheel_holds_the_package(distributions):
    _, wheel = distributions
    own = f"monai_zcache-{zcache.__version__}"
    assert wheel.name == f"{own}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        commands = archive.read(f"{own}.dist-info/entry_points.txt").decode()
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    package = {name for name in git_files() if name.startswith("zcache/")}
    assert held == package | {f"{own}.dist-info/{name}" for name in about}
    assert "zcache/py.typed" in held
    assert commands == "[console_scripts]\nzcache = zcache.cli.app:app\n"


def test_the_metadata(distributions):
    _, wheel = distributions
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == (DISTRIBUTION, zcache.__version__)
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE"]
    assert "MONAI" in about["Keywords"].split(",")
    assert all(re.fullmatch(r"[^,]+, https://\S+", url) for url in about.get_all("Project-URL"))
    needed = [requirement for requirement in about.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in needed} >= {
        "torch",
        "monai",
        "zarr",
        "typer",
        "rich",
    }


def test_the_page_about_it_is_the_readme_without_links_that_lead_nowhere(distributions):
    _, wheel = distributions
    about = metadata(wheel)
    page, readme = about.get_payload(), (REPOSITORY / "README.md").read_text("utf-8")
    assert about["Description-Content-Type"] == "text/markdown"
    assert RELATIVE_LINK.search(readme)
    assert not RELATIVE_LINK.search(page)
    assert re.findall(r"\[[^]]+\]\(https?:[^)]+\)", page) == re.findall(r"\[[^]]+\]\(https?:[^)]+\)", readme)
    assert [line for line in page.splitlines() if line.startswith("#")] == re.findall(r"^#.*$", readme, re.MULTILINE)


def test_the_package_runs_as_a_module():
    run = [sys.executable, "-m", "zcache"]
    assert (
        subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout
        == f"{zcache.__version__}\n"
    )
    wrong = subprocess.run([*run, "info", "-C", "/nowhere"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n"), wrong.stderr[:8]) == (2, 1, "zcache: ")
