"""What it costs to believe nothing: reading patches with and without checksums and header checks.

Run it with ``python -m benchmarks.checks``. The same entry of a real or generated CT is read through the same reader,
with its chunks decoded as zcache does it (CRC-32C and Blosc header compared first) and, for the measurement alone, by
the bare decoder. Both take turns, patch by patch; times are those of the processor, so that others disturb them less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numcodecs import blosc

from benchmarks import arrays, data
from benchmarks.measure import median
from benchmarks.report import markdown
from zcache import Cache
from zcache.storage import reader

KEY = "0" * 32
LIMIT = 0.05


def bare(frame: Any, out: Any, _codec: Any = None) -> None:
    """Decode a chunk, checking nothing."""
    blosc.decompress(frame[:-4], out)


def seconds(read: Callable[[Any], object], box: Any) -> float:
    """Return the processor time of one read."""
    begun = time.thread_time()
    read(box)
    return time.thread_time() - begun


def share(cache: Cache, boxes: Sequence[Any], rounds: int) -> tuple[float, float]:
    """Return the median time of a patch, and the part of it that the checks take."""

    def read(box: Any) -> object:
        return cache.get_region(KEY, "image", box)

    checked, unchecked, ratios = [], [], []
    for number in range(rounds):
        for box in boxes:
            pair = {}
            for way in (False, True) if number % 2 else (True, False):
                with mock.patch.object(reader, "decode_chunk", reader.decode_chunk if way else bare):
                    pair[way] = seconds(read, box)
            checked.append(pair[True])
            unchecked.append(pair[False])
            ratios.append(pair[False] / pair[True])
    return median(checked), 1 - median(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--patches", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a smoke run on a tiny generated volume")
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = (24, 28, 32) if options.quick else data.CT_SHAPE
        source = Path(folder) if options.quick else data.SHARED_DATA
        volume = arrays.load(Path(folder) / "volumes", scans=source, shape=small)
        forms = {"CT (int16 codes)": volume.loaded, "windowed CT (uint8 codes)": volume.windowed}
        for title, values in forms.items():
            edge = min(96, *(n // 2 for n in values.shape[1:]))
            boxes = arrays.random_boxes(values.shape, edge, options.patches)
            with Cache(Path(folder) / title) as cache:
                cache.put(KEY, {"image": np.ascontiguousarray(values)}, patch=(edge,) * 3)
                cache.flush()
                taken, part = share(cache, boxes, 2 if options.quick else options.rounds)
            rows.append(
                [title, f"{taken * 1e3:.2f} ms", f"{part:.1%}", f"≤ {LIMIT:.0%}", "yes" if part <= LIMIT else "NO"]
            )
    print(markdown(["", "patch of 96³", "checks", "limit", "met"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
