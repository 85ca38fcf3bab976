"""Where the time of a read goes: each of its steps alone, over the same chunks.

Run it with ``python -m benchmarks.parts``. The steps are those of ``zcache.storage.reader``, run one by one on what the
step before left in memory, so their sum is a little less than a read, in which each finds less in the processor's
caches. Times are those of the processor, medians over rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc

from benchmarks import arrays, data
from benchmarks.measure import median
from benchmarks.report import markdown
from zcache import Cache
from zcache.encoding.restoring import restore
from zcache.encoding.rows import copy_rows
from zcache.storage import reader
from zcache.storage.entry import StoredEntry
from zcache.storage.plan import plan_slabs

KEY = "0" * 32


def milliseconds(step: Callable[[Any], object], boxes: Sequence[Any], rounds: int) -> float:
    """Return the median processor time of a step for one box."""
    taken = []
    for _ in range(rounds):
        begun = time.thread_time()
        for box in boxes:
            step(box)
        taken.append((time.thread_time() - begun) / len(boxes))
    return median(taken) * 1e3


def steps(entry: StoredEntry, boxes: Sequence[Any], rounds: int) -> list[float]:
    """Return the milliseconds of a whole read, of each step, and of touching the output's memory."""
    shard = entry._shard("image", [None])  # noqa: SLF001 - what a read is made of
    record, grid = shard.record, shard.record.grid
    shape = [stop - start for start, stop in boxes[0]]
    out, scratch = np.empty(shape, record.narrowing.dtype), np.empty(grid.chunk_shape, record.dtype)

    def plan(box: Any) -> Any:
        return plan_slabs(grid, box, reader._SLAB_BYTES // record.dtype.itemsize)  # noqa: SLF001

    def fetch(box: Any) -> list[Any]:
        return [frame for slab in plans[box] for frame in reader._frames(shard._fd, shard._stored(slab.reads))]  # noqa: SLF001

    plans = {box: plan(box) for box in boxes}
    frames = {box: [frame for _, frame in fetch(box)] for box in boxes}
    codes = {box: [np.zeros(out[slab.out_part].shape, record.dtype) for slab in plans[box]] for box in boxes}

    def copy(box: Any) -> None:
        for slab, target in zip(plans[box], codes[box], strict=True):
            for read in slab.reads:
                copy_rows(scratch[read.chunk_part], target[read.out_part])

    def values(box: Any) -> None:
        for slab, source in zip(plans[box], codes[box], strict=True):
            restore(source, record.narrowing, out[slab.out_part])

    return [
        milliseconds(step, boxes, rounds)
        for step in (
            shard.read,
            plan,
            fetch,
            lambda box: [blosc.decompress(frame[:-4], scratch) for frame in frames[box]],
            lambda box: [reader.decode_chunk(frame, scratch, record.codec) for frame in frames[box]],
            copy,
            values,
            lambda _: np.empty(shape, record.narrowing.dtype).fill(0),
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patches", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a smoke run on a tiny generated volume")
    options = parser.parse_args(argv)
    header = ["ms", "read", "plan", "pread", "decoding", "decoding and checks", "copy", "cast or table", "touch output"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = (24, 28, 32) if options.quick else data.CT_SHAPE
        source = Path(folder) if options.quick else data.SHARED_DATA
        volume = arrays.load(Path(folder) / "volumes", scans=source, shape=small)
        for form, values in (("CT", volume.loaded), ("windowed CT", volume.windowed)):
            edge = min(96, *(n // 2 for n in values.shape[1:]))
            whole = [tuple((0, n) for n in values.shape)]
            with Cache(Path(folder) / form) as cache:
                cache.put(KEY, {"image": values})
                cache.flush()
                for what, boxes in (
                    ("patch", arrays.random_boxes(values.shape, edge, options.patches)),
                    ("whole", whole),
                ):
                    taken = cache.using(KEY, lambda entry, boxes=boxes: steps(entry, boxes, options.rounds), [])
                    rows.append([f"{form}, {what}", *(f"{ms:.2f}" for ms in taken)])
    print(markdown(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
