"""How long it takes to look into a cache: to import what is needed, to open it, to list it.

``python -m benchmarks.inspect`` generates caches of 1,000 and 10,000 entries (an image and a label each, a pipeline and
stamps of two source files; the arrays themselves, which no list reads, are left out) and measures, in processes of
their own and the best of several:

- import: ``-X importtime`` and CPU seconds of `zcache` with what `open_cache` needs, and of the command; neither may
  bring torch, MONAI, zarr or matplotlib, which is asserted;
- ls: wall and CPU seconds of ``zcache ls`` into a pipe, and its peak resident memory;
- survey: the same entries looked up by one thread and by several, with and without a delay for each document that is
  read, which stands for a network file system. The delay is slept: it says what waiting costs, nothing of any server.

There are no peers: MONAI's caches are pickles, which have to be loaded one by one to know what they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import zcache
from benchmarks.machine import environment, sentence
from zcache.encoding.layout import entry_document, parse_entry
from zcache.storage import files

HEAVY = ("torch", "monai", "zarr", "matplotlib", "pandas", "nibabel")
SIZES = (1_000, 10_000)
DELAY_S = 0.002
IMPORTS = {"open_cache": "import zcache; zcache.open_cache", "the command": "import zcache.cli.app"}
COMMAND = "from zcache.cli.app import app; app()"
STEPS = [
    {
        "transform": name,
        "module": "monai.transforms",
        "parameters": {"keys": ["image", "label"], "pixdim": [1.0, 1.0, 2.0]},
    }
    for name in ("LoadImaged", "EnsureChannelFirstd", "Orientationd", "Spacingd", "ScaleIntensityRanged")
]


def generate(folder: Path, n: int) -> None:
    """Make a cache of n entries: one is written, the others have its document with sources of their own in it."""
    rng = np.random.default_rng(0)
    image = rng.normal(0, 40, (1, 40, 44, 48)).round().astype(np.float32)
    with zcache.Cache(folder, on_error="raise") as cache:
        cache.put(f"{0:032x}", {"image": image, "label": (image > 20).astype(np.uint8), "patient": "P"}, _about(0))
    root = folder / "cache.zarr"
    record = parse_entry((root / f"{0:032x}" / "zarr.json").read_bytes())
    for i in range(1, n):
        entry = root / f"{i:032x}"
        entry.mkdir()
        entry.joinpath("zarr.json").write_bytes(entry_document(replace(record, about={**record.about, **_about(i)})))


def _about(i: int) -> dict[str, Any]:
    paths = [f"/data/patient_{i:06}/{name}.nii.gz" for name in ("ct", "seg")]
    stamps = [{"path": path, "size": 1 << 20, "mtime_ns": 1_700_000_000_000_000_000 + i} for path in paths]
    return {"source": paths, "sources": stamps, "pipeline": STEPS}


def measured(arguments: list[str]) -> tuple[float, float, float]:
    """Run Python; return wall seconds, CPU seconds and peak resident memory in MB of that process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{arguments} ended with {process.returncode}"
    per_kb = 1 if sys.platform == "darwin" else 1024
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * per_kb / 1e6


def import_s(statement: str) -> float:
    """Return the seconds that a statement spends in imports, by ``-X importtime``."""
    code = f"{statement}\nimport sys; print(sorted(set({HEAVY}) & set(sys.modules)))"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", f"{statement} imports {done.stdout.strip()}"
    own = re.findall(r"import time: +(\d+) \|", done.stderr)
    return sum(map(int, own)) / 1e6


def survey_s(folder: Path, threads: int, n: int, delay_s: float) -> float:
    """Return the seconds that looking up the first n entries takes."""
    view = zcache.open_cache(folder)
    keys = list(view)[:n]
    real = files.read_below

    def late(*args: Any) -> bytes:
        time.sleep(delay_s)
        return real(*args)

    files.read_below = late if delay_s else real
    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(view._opened.info, keys))  # noqa: SLF001 - with another number of threads than usual
    finally:
        files.read_below = real
    assert {info.status for info in found} == {"ok"}
    return time.perf_counter() - start


def run(folder: Path, repeats: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure everything; return it as JSON."""
    bare = min(measured(["-c", "pass"])[1] for _ in range(repeats))
    start = measured(["-c", f"import sys; sys.argv = ['zcache', '--version']; {COMMAND}"])
    found: dict[str, Any] = {
        "environment": environment(["numpy", "typer", "rich"]),
        "import": {
            name: {
                "wall_s": min(import_s(statement) for _ in range(repeats)),
                "cpu_s": min(measured(["-c", statement])[1] for _ in range(repeats)) - bare,
            }
            for name, statement in IMPORTS.items()
        },
        "zcache --version": dict(zip(("wall_s", "cpu_s", "peak_mb"), start, strict=True)),
        "ls": {},
        "survey": {},
    }
    for n in sizes:
        cache = folder / str(n)
        generate(cache, n)
        code = f"import sys; sys.argv = ['zcache', 'ls', {str(cache)!r}]; {COMMAND}"
        runs = [measured(["-c", code]) for _ in range(repeats)]
        best = [min(values) for values in zip(*runs, strict=True)]
        found["ls"][str(n)] = dict(zip(("wall_s", "cpu_s", "peak_mb"), best, strict=True))
    largest, few = max(sizes), min(*sizes, 1_000)
    for threads in (1, 2, 4, 8):
        best_s = min(survey_s(folder / str(largest), threads, largest, 0) for _ in range(repeats))
        waiting = survey_s(folder / str(largest), threads, few, DELAY_S)
        found["survey"][str(threads)] = {"local_s": best_s, "delayed_s": waiting}
    growth = found["ls"][str(largest)]["peak_mb"] - found["ls"][str(min(sizes))]["peak_mb"]
    found["kb_per_entry"] = growth * 1e3 / max(1, largest - min(sizes))
    return found


def report(found: dict[str, Any], sizes: tuple[int, ...]) -> list[str]:
    """Return what was measured as lines of text."""
    start = found["zcache --version"]
    lines = [sentence(found["environment"]), ""]
    for name, took in found["import"].items():
        lines.append(f"import of {name:<13}     {took['wall_s']:.2f} s wall, {took['cpu_s']:.2f} s CPU")
    took = f"{start['wall_s']:.2f} s wall, {start['cpu_s']:.2f} s CPU, {start['peak_mb']:.0f} MB"
    lines.append(f"zcache --version            {took}")
    for n in sizes:
        ls = found["ls"][str(n)]
        lines.append(
            f"zcache ls, {n:>6,} entries   {ls['wall_s']:.2f} s wall, {ls['cpu_s']:.2f} s CPU, {ls['peak_mb']:.0f} MB"
        )
    lines += [f"memory                      {found['kb_per_entry']:.1f} KB for each entry more", ""]
    largest, few = max(sizes), min(*sizes, 1_000)
    lines.append(f"threads   {largest:,} entries here   {few:,} entries, {DELAY_S * 1e3:g} ms for each document")
    for threads, one in found["survey"].items():
        lines.append(f"{threads:>7}   {one['local_s']:>16.2f} s   {one['delayed_s']:>20.2f} s")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inspect", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--entries", type=int, nargs="+", default=SIZES, help="how many, two numbers or more")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    sizes = tuple(sorted(options.entries))
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options.repeats, sizes)
    print(json.dumps(found) if options.json else "\n".join(report(found, sizes)))


if __name__ == "__main__":
    main()
