"""Reads one volume, and patches of it, from zcache and from the stores that others use, side by side.

Run it with ``python -m benchmarks.read``. A CT of 240×252×328 voxels is stored twice, in Hounsfield units and windowed
as MONAI does it, by every peer (see ``benchmarks/stores.py``). Before anything is timed, each peer must have returned
the source bit by bit. How each figure is obtained:

- One process, one thread, everything in the page cache. Each peer stays open, as in training.
- A round reads the whole volume once with each peer in turn, then all patches with each peer in turn; every round
  begins with another peer. A peer's result is freed before the next read.
- Times are the median and the minimum over the rounds, of patches the mean over all patches of a round. A ratio is
  formed within each round, of which the median is printed: what slows a whole round down leaves it alone.
- Before each whole volume, and before the patches, the process touches and frees as much memory as they need: the first
  touch of memory that a virtual machine has handed back is ten times as slow, for whoever comes first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import arrays, machine
from benchmarks.measure import median, tree_bytes, warm_memory
from benchmarks.report import markdown

try:
    import blosc2

    from benchmarks import stores
except ModuleNotFoundError as e:
    raise SystemExit(
        f"benchmarks.read compares zcache with {e.name}, which is missing: pip install -e '.[bench]'"
    ) from e

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "torch", "monai", "numcodecs", "zarr", "tensorstore", "blosc2", "mlarray")

#: A peer that loads the whole volume for each patch takes as long for every one of them.
WHOLE_ONLY_PATCHES = 2


@dataclass(frozen=True)
class Result:
    """What was measured of one peer.

    Attributes
    ----------
    label
        The peer.
    nbytes
        Bytes of its files.
    whole, patch
        Seconds in each round: for the whole volume, and for a patch on average.
    """

    label: str
    nbytes: int
    whole: list[float] = field(default_factory=list)
    patch: list[float] = field(default_factory=list)


def check_exact(peer: stores.Peer, form: stores.Form, read: stores.Read, box: arrays.Box) -> None:
    """Make sure that a peer returns the source's bits, in memory that the caller may write to."""
    got, expected = read(box), form.values[stores.slices(box)]
    if not (got.dtype == np.float32 and got.shape == expected.shape and got.flags.c_contiguous and got.flags.writeable):
        raise AssertionError(f"{peer.label}: {got.dtype} {got.shape} is not an array of the caller's own")
    if not np.array_equal(got.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)):
        raise AssertionError(f"{peer.label}: the values differ from the source")
    if np.shares_memory(got, form.values):
        raise AssertionError(f"{peer.label}: the values are the source's own")


def seconds(read: stores.Read, boxes: Sequence[arrays.Box]) -> float:
    """Return the seconds that reading a box takes on average; each result is freed inside the measured time."""
    start = time.perf_counter()
    for box in boxes:
        read(box)
    return (time.perf_counter() - start) / len(boxes)


def measure_form(
    form: stores.Form, peers: Sequence[stores.Peer], folder: Path, boxes: Sequence[arrays.Box], rounds: int
) -> list[Result]:
    """Store a form with every peer, check them, and measure them in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = [stores.whole(form.values.shape)]
    memory = 2 * form.values.nbytes
    with ExitStack() as opened, tqdm(total=len(peers) * (rounds + 1), unit="peer", desc=form.key) as progress:
        reads: list[stores.Read] = []
        results: list[Result] = []
        for peer in peers:
            peer.store(form, folder)
            path = folder / peer.file
            results.append(Result(peer.label, tree_bytes(path) if path.is_dir() else path.stat().st_size))
            reads.append(opened.enter_context(peer.open(form, folder)))
            for box in (*everything, *boxes[:WHOLE_ONLY_PATCHES]):
                if peer.exact:
                    check_exact(peer, form, reads[-1], box)
                else:
                    reads[-1](box)
            progress.update()
        for turn in range(rounds):
            order = [(turn + step) % len(peers) for step in range(len(peers))]
            for i in order:
                warm_memory(memory)
                results[i].whole.append(seconds(reads[i], everything))
            warm_memory(memory)
            for i in order:
                some = boxes[:WHOLE_ONLY_PATCHES] if peers[i].whole_only else boxes
                results[i].patch.append(seconds(reads[i], some))
                progress.update()
    return results


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over the rounds of a ratio that is formed within each round."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))


def results_table(results: Sequence[Result]) -> str:
    """Return the table of one form, zcache first."""
    header = ["", "MB on disk"]
    for name in ("whole", "patch"):
        header += [f"{name}, ms", "min", "/ zcache"]
    rows = []
    for result in results:
        row = [result.label, "–" if result.label.startswith("limit") else f"{result.nbytes / 1e6:.1f}"]
        for name in ("whole", "patch"):
            mine, reference = getattr(result, name), getattr(results[0], name)
            row += [f"{median(mine) * 1e3:.2f}", f"{min(mine) * 1e3:.2f}", f"{ratio(mine, reference):.2f}"]
        rows.append(row)
    return markdown(header, rows)


@dataclass(frozen=True)
class Goal:
    """What is asked of the reader.

    Attributes
    ----------
    text
        The quotient in words.
    value, of_minima
        The quotient: median over the rounds, and of the fastest rounds.
    sign, limit
        "≥" or "≤", and what to compare it with.
    """

    text: str
    value: float
    of_minima: float
    sign: str
    limit: float

    @property
    def met(self) -> bool:
        """Tell whether the median keeps the limit."""
        return self.value <= self.limit if self.sign == "≤" else self.value >= self.limit


def goals(results: Sequence[Result]) -> Iterator[Goal]:
    """Yield what is asked of the reader beside what was measured."""
    by_label = {result.label: result for result in results}
    own, memcpy, decoding = (by_label[peer.label] for peer in (stores.ZCACHE, stores.MEMCPY, stores.DECODING))
    for peer, limit in ((stores.ZARR_PYTHON, 2.0), (stores.TENSORSTORE, 1.0), (stores.B2ND_LZ4, 1.0)):
        other = by_label[peer.label].patch
        yield Goal(f"patch: {peer.label} / zcache", ratio(other, own.patch), min(other) / min(own.patch), "≥", limit)
    yield Goal(
        "patch: zcache / decoding alone",
        ratio(own.patch, decoding.patch),
        min(own.patch) / min(decoding.patch),
        "≤",
        1.4,
    )
    both = [a + b for a, b in zip(decoding.whole, memcpy.whole, strict=True)]
    least = min(decoding.whole) + min(memcpy.whole)
    yield Goal("whole: zcache / (decoding + memcpy)", ratio(own.whole, both), min(own.whole) / least, "≤", 1.25)


def goals_table(results: Sequence[Result]) -> str:
    """Return the goals as a table."""
    rows = [
        [g.text, f"{g.sign} {g.limit:g}", f"{g.value:.2f}", f"{g.of_minima:.2f}", "yes" if g.met else "NO"]
        for g in goals(results)
    ]
    return markdown(["goal", "limit", "measured", "of the minima", "met"], rows)


def forms(volume: arrays.Arrays) -> Iterator[stores.Form]:
    """Yield the CT in Hounsfield units, then windowed."""
    yield stores.Form("ct", "CT in Hounsfield units (int16 in every store)", volume.loaded, volume.hounsfield)
    windowed = volume.windowed
    title = "CT windowed to 0…1 (codes and a table in zcache's store, float32 in the others)"
    yield stores.Form("window", title, windowed, windowed)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often each peer has its turn")
    parser.add_argument("--patches", type=int, default=16, metavar="N", help="random patches in each round")
    parser.add_argument("--dir", type=Path, default=PROJECT / "build" / "benchmarks", help="where to write the stores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--quick", action="store_true", help="a smoke run on a tiny generated volume")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    options = arguments(argv)
    torch.set_num_threads(1)
    blosc2.set_nthreads(1)
    edge = stores.PATCH
    if options.quick:
        edge = 12
        volume = arrays.load(options.dir / "quick-one", scans=options.dir, shape=(20, 24, 28))
    else:
        volume = arrays.load(options.dir / "one")
    facts = machine.environment(PACKAGES)
    boxes = arrays.random_boxes(volume.hounsfield.shape, edge, options.patches)
    print(f"Volume: {volume.source}. {options.rounds} rounds, {options.patches} patches of {edge}³, one thread.\n")
    print(machine.sentence(facts), flush=True)
    measured: dict[str, Mapping[str, Any]] = {}
    folder = options.dir / "read"
    try:
        for form in forms(volume):
            results = measure_form(form, stores.PEERS, folder / form.key, boxes, options.rounds)
            measured[form.key] = {result.label: vars(result) for result in results}
            print(f"\n## {form.title}\n\n{results_table(results)}\n\n{goals_table(results)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"source": volume.source, "environment": facts, "edge": edge, "forms": measured}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
