"""The benchmark and the demo run from end to end on tiny volumes, and their helpers compute what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks import checks, data, demo, epochs, measure, parts, peers, report, rounds

if TYPE_CHECKING:
    from pathlib import Path


def test_epochs_quick_run_measures_every_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results" / "epochs.json"
    assert epochs.main(["--quick", "--workdir", str(tmp_path), "--json", str(target)]) == 0
    document = json.loads(target.read_text())
    for key, pipeline in document["pipelines"].items():
        labels = [peer.label for peer in peers.PIPELINES[key].peers]
        assert list(pipeline["peers"]) == labels
        assert all(pipeline["peers"][label]["warm"] for label in labels[0 if pipeline["patches"] else 1 :])
        assert pipeline["peers"]["zcache"]["bytes"] > 0
    assert str(tmp_path) not in target.read_text(), "results must not name paths"
    printed = capsys.readouterr().out
    assert "## Goals" in printed
    assert not (tmp_path / "caches").exists()


def test_demo_quick_run_has_identical_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rounds.threads(1):  # beside other tests, threads that wait for each other would take most of the time
        assert demo.main(["--quick", "--workdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "identical to the last bit" in printed
    assert (tmp_path / "zcache" / "cache.zarr").is_dir()


def test_generated_ct_looks_like_one() -> None:
    image, label = data.generate_ct((24, 28, 32))
    assert (image.dtype, label.dtype) == (np.int16, np.uint8)
    assert image.min() < -900
    assert image.max() > 300
    assert 0 < label.mean() < 0.1
    assert len(np.unique(image)) > 500
    mirrored = data.mirror(image)
    assert mirrored.shape == (48, 56, 64)
    np.testing.assert_array_equal(mirrored, np.flip(mirrored, 1))


def test_volumes_are_written_once(tmp_path: Path) -> None:
    first = data.ct_volumes(tmp_path / "v", folder=tmp_path, shape=(8, 8, 8), copies=2)
    stamps = [path.stat().st_mtime_ns for path in (tmp_path / "v").glob("*.nii.gz")]
    again = data.ct_volumes(tmp_path / "v", folder=tmp_path, shape=(8, 8, 8), copies=2)
    assert again == first
    assert stamps == [path.stat().st_mtime_ns for path in (tmp_path / "v").glob("*.nii.gz")]
    assert len(stamps) == 4


def test_a_wrong_voxel_stops_the_benchmark() -> None:
    image = torch.zeros(3)
    rounds.check_equal({"image": image}, {"image": image.clone()}, peers.ZCACHE)
    with pytest.raises(AssertionError, match="differs"):
        rounds.check_equal({"image": image}, {"image": image + 1e-6}, peers.ZCACHE)
    rounds.check_equal({"image": image}, {"image": image + 5e-5}, peers.ZCACHE_PRECISION)
    with pytest.raises(AssertionError, match="off by"):
        rounds.check_equal({"image": image}, {"image": image + 2e-4}, peers.ZCACHE_PRECISION)


def test_arithmetic_at_a_bounded_rate() -> None:
    slow_disk = {"warm": [0.05], "cold": [0.06], "cold_disk": [150_000_000]}
    assert report.bounded(slow_disk, 150_000_000) == pytest.approx(1.05)
    slow_code = {"warm": [0.05], "cold": [2.0], "cold_disk": [150_000_000]}
    assert report.bounded(slow_code, 150_000_000) == 2.0


def test_peers_take_turns() -> None:
    order = [peers.UNCACHED, peers.LMDB, peers.ZCACHE]
    assert [rounds.rotated(order, turn)[0] for turn in range(4)] == [*order, peers.UNCACHED]


def test_markdown_table_is_rectangular() -> None:
    lines = report.markdown(["", "a"], [["x", "1"], ["longer", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "|--------|---:|"


def test_samples_count_time(tmp_path: Path) -> None:
    taken = measure.sample(lambda: sum(range(100_000)))
    assert taken.wall > 0
    assert (taken + taken).wall == 2 * taken.wall
    (tmp_path / "a").write_bytes(b"12345")
    assert (measure.tree_bytes(tmp_path), measure.tree_files(tmp_path)) == (5, 1)
    measure.make_cold([tmp_path], system_wide=False)


def test_checks_quick_run_prints_a_share_of_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert checks.main(["--quick", "--patches", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "ms" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["CT (int16 codes)", "windowed CT (uint8 codes)"]
    assert all(float(row.split("|")[3].strip().rstrip("%")) < 100 for row in rows)


def test_parts_quick_run_prints_each_step_of_four_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main(["--quick", "--patches", "2", "--rounds", "1"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "CT" in line]
    assert [row[0].strip() for row in rows] == ["CT, patch", "CT, whole", "windowed CT, patch", "windowed CT, whole"]
    assert all(float(cell) >= 0 for row in rows for cell in row[1:])
