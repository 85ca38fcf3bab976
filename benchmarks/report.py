"""Turns the benchmark's measurements into Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.measure import NFS_RATE, median

#: One peer's measurements, as they are written to the JSON file.
Result = Mapping[str, Any]

REFERENCE = "PersistentDataset"
UNCACHED = "Dataset (no cache)"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, its first column left-aligned and the others right-aligned."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if not column else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 2) if not column else "-" * (width + 1) + ":" for column, width in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *(line(row) for row in cells[1:])])


def megabytes(count: float) -> str:
    """Return a byte count in MB (10⁶ bytes)."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def times(ratio: float) -> str:
    """Return a ratio as a factor."""
    return f"{ratio:.2f} ×"


def first_epoch_ratio(results: Mapping[str, Result], label: str) -> float:
    """Return a peer's first epoch over the plain dataset's: the median over rounds, each round its own pair."""
    pairs = zip(results[label]["first"], results[UNCACHED]["first"], strict=True)
    return median(mine / plain for mine, plain in pairs)


def first_epoch_table(results: Mapping[str, Result]) -> str:
    """Return the table of the first epoch, when nothing is cached yet."""
    rows = [
        [
            label,
            f"{median(result['first']):.2f} s",
            times(first_epoch_ratio(results, label)),
            milliseconds(median(result["flush"])) if "flush" in result else "–",
        ]
        for label, result in results.items()
    ]
    return markdown(["", "first epoch", "against no cache", "last item until flushed"], rows)


def bounded(result: Result, rate: int = NFS_RATE) -> float:
    """Return the seconds for one item at a bounded disk rate, by arithmetic.

    Reading and decoding are taken not to overlap, and nothing is faster than it was measured from the cold disk.
    """
    warm, cold = median(result["warm"]), median(result["cold"])
    return max(cold, warm + median(result["cold_disk"]) / rate)


def _speedups(results: Mapping[str, Result], name: str, label: str) -> str:
    if REFERENCE not in results or name not in results[label]:
        return "–"
    return times(median(results[REFERENCE][name]) / median(results[label][name]))


def later_epochs_table(results: Mapping[str, Result]) -> str:
    """Return the table of later epochs: one item (image and label, whole volumes), read by one thread."""
    with_limit = any("throttled" in result for result in results.values())
    header = ["", "warm", "speed-up", "cold", "speed-up", "read from disk"]
    if with_limit:
        header += ["150 MB/s, throttled by cgroup blkio", "speed-up"]
    header += ["150 MB/s, by arithmetic", "speed-up"]
    rows = []
    for label, result in results.items():
        if "warm" not in result:
            continue
        row = [label, milliseconds(median(result["warm"])), _speedups(results, "warm", label)]
        if "cold" not in result:
            rows.append(row + ["–"] * (len(header) - 3))
            continue
        row += [
            milliseconds(median(result["cold"])),
            _speedups(results, "cold", label),
            megabytes(median(result["cold_disk"])),
        ]
        if with_limit:
            row += [milliseconds(median(result["throttled"])), _speedups(results, "throttled", label)]
        ratio = times(bounded(results[REFERENCE]) / bounded(result)) if REFERENCE in results else "–"
        rows.append([*row, milliseconds(bounded(result)), ratio])
    return markdown(header, rows)


def size_table(results: Mapping[str, Result], nifti_bytes: int, raw_bytes: int, items: int) -> str:
    """Return the table of bytes on disk, of all items together."""
    reference = results.get(REFERENCE, {}).get("bytes")
    rows = [
        [".nii.gz files", megabytes(nifti_bytes), times(1.0), "–", "2"],
        ["float32 in memory", megabytes(raw_bytes), times(raw_bytes / nifti_bytes), "–", "–"],
    ]
    rows += [
        [
            label,
            megabytes(result["bytes"]),
            times(result["bytes"] / nifti_bytes),
            times(result["bytes"] / reference) if reference else "–",
            f"{result['files'] / items:.1f}",
        ]
        for label, result in results.items()
        if "bytes" in result
    ]
    return markdown(["", "bytes on disk", "against .nii.gz", "against PersistentDataset", "files per item"], rows)


def volumes_table(volumes: Sequence[Result]) -> str:
    """Return the table of every real volume, loaded without windowing."""
    rows = [
        [
            volume["name"],
            volume["shape"],
            megabytes(volume["nifti"]),
            megabytes(volume["raw"]),
            megabytes(volume["zcache"]),
            times(volume["zcache"] / volume["nifti"]),
            times(volume["zcache"] / volume["raw"]),
        ]
        for volume in volumes
    ]
    total = {key: sum(volume[key] for volume in volumes) for key in ("nifti", "raw", "zcache")}
    rows.append(
        [
            "together",
            "",
            *(megabytes(total[key]) for key in ("nifti", "raw", "zcache")),
            times(total["zcache"] / total["nifti"]),
            times(total["zcache"] / total["raw"]),
        ]
    )
    return markdown(["volume", "shape", ".nii.gz", "float32", "zcache", "/ .nii.gz", "/ float32"], rows)


def _goals(key: str, pipeline: Mapping[str, Any]) -> Iterator[tuple[str, float, str, float]]:
    """Yield what is asked of a pipeline: text, measured value, comparison, limit."""
    results, nifti = pipeline["peers"], pipeline["nifti_bytes"]
    reference = results[REFERENCE]
    if pipeline["patches"]:
        yield from _patch_goals(key, results)
        return
    share = results["zcache"]["bytes"] / reference["bytes"]
    if key == "window":
        yield "bytes / .nii.gz", results["zcache"]["bytes"] / nifti, "≤", 0.55
        yield "bytes / PersistentDataset", share, "≤", 1 / 12
    else:
        yield "bytes / PersistentDataset", share, "≤", 0.32
        yield "precision=1e-4: bytes / .nii.gz", results["zcache, precision=1e-4"]["bytes"] / nifti, "≤", 1.1
    for label, result in results.items():
        if label.startswith("zcache"):
            prefix = label.removeprefix("zcache").removeprefix(", ")
            prefix = f"{prefix}: " if prefix else ""
            yield f"{prefix}first epoch / Dataset", first_epoch_ratio(results, label), "≤", 1.08
            for name, limit in (("warm", 1.15), ("cold", 1.5), ("throttled", 5.0)):
                if name in result:
                    speedup = median(reference[name]) / median(result[name])
                    yield f"{prefix}{name}, speed-up", speedup, "≥", limit
            yield f"{prefix}150 MB/s by arithmetic, speed-up", bounded(reference) / bounded(result), "≥", 5.0


def _patch_goals(key: str, results: Mapping[str, Result]) -> Iterator[tuple[str, float, str, float]]:
    warm = median(results["zcache"]["warm"])
    asked = {"spatial": {REFERENCE: 15.0}, "guided": {REFERENCE: 10.0, "CacheDataset(copy_cache=False)": 5.0}}
    for label, limit in asked[key].items():
        yield f"warm, speed-up against {label}", median(results[label]["warm"]) / warm, "≥", limit


def goals_table(pipelines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the project set out to reach beside what was measured."""
    rows = []
    for key, pipeline in pipelines.items():
        for text, value, sign, limit in _goals(key, pipeline):
            met = value <= limit if sign == "≤" else value >= limit
            rows.append([f"{key}: {text}", f"{sign} {limit:.3g}", f"{value:.3g}", "yes" if met else "NO"])
    return markdown(["goal", "limit", "measured", "met"], rows)
