"""Runs the notebooks and writes them back with their outputs: `make notebooks`.

What tells of the machine and the day is left out: times of execution, versions, dates. Pictures get a palette, which
makes them a third of the size.
"""

from __future__ import annotations

import base64
import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")


def execute(path: Path) -> Any:
    """Return a notebook with the outputs of a run from top to bottom."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    return normalised(client.execute())


def normalised(notebook: Any) -> Any:
    """Return a notebook without the traces of the machine: times of execution, versions, random names."""
    kept = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    if "widgets" in notebook.metadata:
        kept["widgets"] = notebook.metadata["widgets"]
    notebook.metadata = nbformat.from_dict(kept)
    for number, cell in enumerate(notebook.cells):
        cell.metadata = nbformat.from_dict({})
        cell.id = f"cell-{number:02}"
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                _clean(output)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Return outputs with the pieces of a stream put together, which come as the kernel happens to send them."""
    found: list[Any] = []
    for output in outputs:
        before = found[-1] if found else {}
        if output.output_type == "stream" and output.get("name") == before.get("name"):
            before["text"] += output.text
        else:
            found.append(output)
    return found


def _clean(output: Any) -> None:
    """Take dates out of an output's texts, and colours out of its pictures."""
    if "text" in output:
        output["text"] = _DATE.sub("YYYY-MM-DD hh:mm UTC", output["text"])
    data = output.get("data", {})
    for kind in data:
        if kind.startswith("text/"):
            data[kind] = _DATE.sub("YYYY-MM-DD hh:mm UTC", data[kind])
    if "image/png" in data:
        with io.BytesIO() as buffer:
            picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
            picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                buffer, "PNG", optimize=True
            )
            data["image/png"] = base64.b64encode(buffer.getvalue()).decode("ascii")


def main(names: list[str]) -> None:
    """Run the notebooks that are named, or all."""
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.ipynb")):
        begun = time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s, {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
