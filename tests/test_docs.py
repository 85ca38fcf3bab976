"""The code on the pages of docs/ runs, and prints what the pages say; the commands that they show are there."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import griffe
import pytest
import typer.main

import zcache
import zcache.errors
from tests.support import REPOSITORY
from zcache.cli.app import app

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_FENCE = re.compile(
    r"(?P<comment><!--[^>]*-->\n+)?^```(?P<language>\w+)(?P<options>[^\n]*)\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    line: int
    end: int
    not_run: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        reason = NOT_RUN.search(match["comment"] or "")
        line = text.count("\n", 0, match.start("text"))
        found.append(
            Block(
                match["language"],
                title[1] if title else "",
                match["text"],
                line,
                text.count("\n", 0, match.end()),
                reason[1] if reason else "",
            )
        )
    return found


def _name(page: Path) -> str:
    return str(page.relative_to(DOCS))


CODE = [page for page in PAGES if any(b.language == "python" and not b.not_run for b in blocks_of(page))]
COMMANDS = [(_name(p), line) for p in PAGES for b in blocks_of(p) if b.language == "sh" for line in b.text.splitlines()]


@pytest.fixture(scope="module")
def package() -> griffe.Object:
    return griffe.load("zcache", search_paths=[REPOSITORY])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder, but for the modules that the tutorial has the reader save."""
    for block in blocks_of(DOCS / "tutorial.md"):
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", CODE, ids=_name)
def test_code_runs_and_prints_what_the_page_says(page, folder, capsys):
    blocks = blocks_of(page)
    names = {"__name__": "__main__"}
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python" or block.not_run or block.title:
            continue  # those with a title are files, which the others import
        code = "\n" * block.line + block.text  # so that a traceback names the line of the page
        exec(compile(code, str(page), "exec"), names)
        printed = capsys.readouterr().out
        told = after is not None and after.language == "text" and not after.title and after.line - block.end <= 2
        if told:
            assert printed == after.text, f"{_name(page)}:{after.line}"


@pytest.mark.parametrize(("page", "command"), [row for row in COMMANDS if row[1].startswith("zcache ")])
def test_commands_exist_with_their_options(page, command):
    _, name, *arguments = shlex.split(command, comments=True)
    group = typer.main.get_command(app)
    known = {option for parameter in group.commands[name].params for option in parameter.opts}
    assert {a for a in arguments if a.startswith("-")} <= known


def test_few_blocks_are_not_run():
    left = {f"{_name(p)}:{b.line}": b.not_run for p in PAGES for b in blocks_of(p) if b.not_run}
    assert len(left) <= 4, left


@pytest.mark.parametrize("name", [n for n in zcache.__all__ if callable(getattr(zcache, n))])
def test_parameters_are_documented_one_by_one(name, package):
    """Several under one entry would all be shown with the type and default of the first."""
    documented = package[name].final_target
    sections = documented.docstring.parse("numpy")
    shown = [p for s in sections if s.kind is griffe.DocstringSectionKind.parameters for p in s.value]
    if shown:
        assert {p.name.lstrip("*"): p.value for p in shown} == {
            p.name: p.default for p in documented.parameters if p.name not in ("self", "args")
        }


def test_every_public_name_has_its_place_in_the_reference():
    shown = set(re.findall(r"^::: zcache\.([\w.]+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE))
    assert set(zcache.__all__) - shown == set(zcache.errors.__all__)
    assert "errors" in shown


def test_every_block_has_a_language():
    fences = [(p, line) for p in PAGES for line in p.read_text("utf-8").splitlines() if line.lstrip().startswith("```")]
    assert all(line.strip() != "```" for _, line in fences[::2])
