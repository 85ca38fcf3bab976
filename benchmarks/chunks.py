"""The sweep by which zcache's defaults are chosen: extent of a chunk, shuffle, codec and level.

Run it with ``python -m benchmarks.chunks``. Four arrays as they are stored: a CT in Hounsfield units (int16), the codes
of the windowed CT (uint8), the resampled CT (true floats) and a label map (uint8). One parameter at a time is varied
around zcache's default, the rest stays. How each figure is obtained:

- "stored" is the bytes of the file over those of the stored array; not over those of the float32 in memory.
- "encoding" covers what the writer does with an array that is narrowed already: cut, compress, checksum.
- "whole" and "96³" are zcache's own reader on one thread, files in the page cache, without the last step from codes
  to values, which costs the same for all rows. The rows take turns; the median over the rounds is printed.
- "decoded / asked" is how many voxels are decoded for each voxel of a random patch: what chunks cost at their borders.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import arrays, machine
from benchmarks.limits import touched
from benchmarks.measure import median, warm_memory
from benchmarks.report import markdown
from zcache.encoding.array_layout import ArrayRecord
from zcache.encoding.chunking import ChunkGrid, choose_chunk_shape
from zcache.encoding.narrowing import Narrowing, narrow
from zcache.encoding.shard import (
    CHUNK_OVERHEAD_BYTES,
    SEAL_BYTES,
    BloscCodec,
    ShardIndex,
    choose_shuffle,
    crc32c,
    frames,
)
from zcache.storage.reader import Shard

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "numcodecs")

CHUNK_KIB = (32, 64, 128, 256, 512, 1024)
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
CODECS = (("lz4", 1), ("lz4", 5), ("lz4", 9), ("lz4hc", 5), ("zstd", 1), ("zstd", 3))
EDGES = (64, 96, 128)
TIMED_EDGE = 96

#: How many random patches the ratios are averaged over; they are counted, not read.
COUNTED_PATCHES = 200

ENCODINGS = 2


@dataclass(frozen=True)
class Variant:
    """One row of the sweep.

    Attributes
    ----------
    varied
        Which parameter it varies; empty for the default.
    chunk_shape
        Extents of a chunk.
    chunk_kib
        The size aimed at.
    codec
        Compressor, level and shuffle.
    """

    varied: str
    chunk_shape: tuple[int, ...]
    chunk_kib: int
    codec: BloscCodec


@dataclass(frozen=True)
class Row:
    """What was measured of a variant.

    Attributes
    ----------
    variant
        The parameters.
    stored
        Bytes of the file over those of the array.
    encoding
        Bytes of the array encoded in a second.
    decoded
        Voxels decoded for each voxel asked for, by edge of the patch.
    whole, patch
        Seconds in each round.
    """

    variant: Variant
    stored: float
    encoding: float
    decoded: dict[int, float]
    whole: list[float] = field(default_factory=list)
    patch: list[float] = field(default_factory=list)


def variants(codes: NDArray[Any]) -> list[Variant]:
    """Return the default for an array, then each parameter varied alone."""
    standard = BloscCodec()

    def chunks(kib: int) -> tuple[int, ...]:
        return choose_chunk_shape(codes.shape, codes.itemsize, target_bytes=kib * 1024)

    # What the writer would take: the default is not one shuffle, it is the choice.
    chunk_shape = choose_chunk_shape(codes.shape, codes.itemsize)
    shuffle = choose_shuffle(codes, ChunkGrid(codes.shape, chunk_shape), standard.cname, standard.clevel)
    kib = min(CHUNK_KIB, key=lambda size: abs(size * 1024 - math.prod(chunk_shape) * codes.itemsize))
    default = Variant("", chunk_shape, kib, replace(standard, shuffle=shuffle))
    rows = [default]
    rows += [replace(default, varied="chunk", chunk_kib=n, chunk_shape=chunks(n)) for n in CHUNK_KIB if n != kib]
    rows += [
        replace(default, varied="shuffle", codec=replace(default.codec, shuffle=other))
        for other in SHUFFLES
        if other != shuffle and (codes.itemsize > 1 or other != "shuffle")  # bytes of one byte cannot be shuffled
    ]
    rows += [
        replace(default, varied="codec", codec=replace(default.codec, cname=cname, clevel=clevel))
        for cname, clevel in CODECS
        if (cname, clevel) != (standard.cname, standard.clevel)
    ]
    return rows


def store(codes: NDArray[Any], variant: Variant, path: Path) -> tuple[ArrayRecord, float]:
    """Write an array as one shard; return what its entry would say of it, and the seconds that encoding took."""
    grid = ChunkGrid(codes.shape, variant.chunk_shape)
    taken = []
    encoded: list[bytes] = []
    for _ in range(ENCODINGS):
        start = time.perf_counter()
        encoded = list(frames(codes, grid, variant.codec))
        taken.append(time.perf_counter() - start)
    index = ShardIndex.from_lengths([len(frame) for frame in encoded]).encode()
    seal = crc32c(b"".join(frame[-CHUNK_OVERHEAD_BYTES:] for frame in encoded))
    path.write_bytes(b"".join([*encoded, seal.to_bytes(SEAL_BYTES, "little"), index]))
    record = ArrayRecord(
        grid=grid,
        dtype=codes.dtype,
        codec=variant.codec,
        narrowing=Narrowing("identity", codes.dtype, codes.dtype),
        shard_nbytes=path.stat().st_size,
        seal=seal,
        index_crc32c=int.from_bytes(index[-CHUNK_OVERHEAD_BYTES:], "little"),
    )
    return record, min(taken)


def decoded_per_voxel(shape: Sequence[int], chunk_shape: Sequence[int], edge: int) -> float:
    """Return how many voxels are decoded for each voxel of a random patch, on average."""
    boxes = arrays.random_boxes(shape, edge, COUNTED_PATCHES)
    chunks = sum(len(touched(box, shape, chunk_shape)) for box in boxes)
    return chunks * math.prod(chunk_shape) / (len(boxes) * shape[0] * edge**3)


def seconds(shard: Shard, boxes: Sequence[arrays.Box]) -> float:
    """Return the seconds that reading a box takes on average."""
    start = time.perf_counter()
    for box in boxes:
        shard.read(box)
    return (time.perf_counter() - start) / len(boxes)


def measure_array(
    title: str, codes: NDArray[Any], folder: Path, edges: Sequence[int], patches: int, rounds: int
) -> list[Row]:
    """Measure every variant of one array; the variants take turns."""
    everything = [tuple((0, extent) for extent in codes.shape)]
    boxes = arrays.random_boxes(codes.shape, edges[len(edges) // 2], patches)
    rows: list[Row] = []
    shards: list[Shard] = []
    chosen = variants(codes)
    with ExitStack() as opened, tqdm(total=len(chosen) * (rounds + 1), unit="row", desc=title) as progress:
        for number, variant in enumerate(chosen):
            path = folder / f"{number}.shard"
            record, taken = store(codes, variant, path)
            shards.append(Shard(os.open(path, os.O_RDONLY), record))
            opened.callback(shards[-1].close)
            if not np.array_equal(shards[-1].read().view(np.uint8), codes.view(np.uint8)):
                raise AssertionError(f"{title}, {variant}: what is read is not what was stored")
            decoded = {edge: decoded_per_voxel(codes.shape, variant.chunk_shape, edge) for edge in edges}
            rows.append(Row(variant, record.shard_nbytes / codes.nbytes, codes.nbytes / taken, decoded))
            progress.update()
        for turn in range(rounds):
            warm_memory(2 * codes.nbytes)
            for step in range(len(rows)):
                i = (turn + step) % len(rows)
                rows[i].whole.append(seconds(shards[i], everything))
                rows[i].patch.append(seconds(shards[i], boxes))
                progress.update()
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows of one array as a table."""
    edges = sorted(rows[0].decoded)
    timed = edges[len(edges) // 2]
    header = ["varied", "chunk", "KiB", "shuffle", "codec", "stored", "encoding, MB/s", "whole, ms", f"{timed}³, ms"]
    header.append("decoded / asked, " + " · ".join(f"{edge}³" for edge in edges))
    lines = []
    for row in rows:
        variant = row.variant
        lines.append(
            [
                variant.varied or "**default**",
                "×".join(map(str, variant.chunk_shape[1:])),
                f"{variant.chunk_kib}",
                variant.codec.shuffle,
                f"{variant.codec.cname} {variant.codec.clevel}",
                f"{row.stored:.3f}",
                f"{row.encoding / 1e6:,.0f}",
                f"{median(row.whole) * 1e3:.1f}",
                f"{median(row.patch) * 1e3:.2f}",
                " · ".join(f"{row.decoded[edge]:.1f}" for edge in edges),
            ]
        )
    return markdown(header, lines)


def stored_arrays(volume: arrays.Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays as zcache stores them, each with its title."""
    yield "CT, int16", volume.hounsfield
    yield "windowed CT, codes", narrow(volume.windowed)[0]
    yield "resampled CT, float32", narrow(volume.resampled)[0]
    yield "label map, uint8", volume.label


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="how often each row has its turn")
    parser.add_argument("--patches", type=int, default=6, metavar="N", help="random patches in each round")
    parser.add_argument("--dir", type=Path, default=PROJECT / "build" / "benchmarks", help="where to write the arrays")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("--quick", action="store_true", help="a smoke run on a tiny generated volume")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep and print its tables."""
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.quick:
        edges: tuple[int, ...] = (8, 12, 16)
        volume = arrays.load(options.dir / "quick-one", scans=options.dir, shape=(20, 24, 28))
    else:
        edges = EDGES
        volume = arrays.load(options.dir / "one")
    text = [f"Volume: {volume.source}. One thread.", machine.sentence(machine.environment(PACKAGES))]
    print("\n\n".join(text), flush=True)
    for title, codes in stored_arrays(volume):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            rows = measure_array(title, codes, Path(folder), edges, options.patches, options.rounds)
        megabytes = f"{codes.nbytes / 1e6:,.1f} MB of {codes.dtype}"
        text.append(f"### {title}: {'×'.join(map(str, codes.shape[1:]))}, {megabytes}")
        text.append(table(rows))
        print(f"\n{text[-2]}\n\n{text[-1]}", flush=True)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text("\n\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
