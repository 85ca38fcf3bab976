"""What is committed of notebooks/: run from top to bottom, small, and without a trace of the machine it was run on.

That they still run is tested by ``pytest --nbmake notebooks``, which is part of ``make test``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support import REPOSITORY

FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"/(home|work|tmp|root|Users|dev/shm|var|opt|usr)/|\d{4}-\d\d-\d\d \d\d:\d\d")
BYTES = 1_000_000


def joined(text):
    return text if isinstance(text, str) else "".join(text)


def outputs(notebook) -> Iterator[dict]:
    return (output for cell in notebook["cells"] for output in cell.get("outputs", ()))


def texts(notebook) -> Iterator[str]:
    """All that is to be read: sources, and what was printed or shown, but for pictures."""
    for cell in notebook["cells"]:
        yield joined(cell["source"])
    for output in outputs(notebook):
        yield joined(output.get("text", ""))
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield re.sub(r"data:image/png;base64,[^\"]*", "", joined(data))
    for widget in notebook["metadata"].get("widgets", {}).values():
        for model in widget["state"].values():
            yield json.dumps(model["state"])


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_quickstart",
        "02_inspect",
        "03_crops_and_memory",
        "04_nfs_and_clusters",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_was_run_from_top_to_bottom_without_an_error(self, path):
        notebook = json.loads(path.read_text("utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert {output["output_type"] for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
        assert all(output.get("name") != "stderr" for output in outputs(notebook))
        assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 3

    def test_says_nothing_of_the_machine(self, path):
        notebook = json.loads(path.read_text("utf-8"))
        found = [match[0] for text in texts(notebook) for match in [MACHINE.search(text)] if match]
        assert found == []

    def test_has_no_metadata_of_a_run(self, path):
        notebook = json.loads(path.read_text("utf-8"))
        assert set(notebook["metadata"]) <= {"kernelspec", "language_info", "widgets"}
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        assert notebook["metadata"]["language_info"] == {"name": "python"}
        assert all(cell["metadata"] == {} for cell in notebook["cells"])

    def test_is_small(self, path):
        assert path.stat().st_size < BYTES

    def test_links_lead_somewhere(self, path):
        notebook = json.loads(path.read_text("utf-8"))
        markdown = "\n".join(joined(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", markdown)
        assert [link for link in links if not (FOLDER / link).exists()] == []
