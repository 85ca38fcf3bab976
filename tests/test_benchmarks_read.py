"""The benchmarks of reading and of chunk shapes run from end to end, and their helpers compute what they say."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import arrays, chunks, limits, read, stores

if TYPE_CHECKING:
    from pathlib import Path


def test_read_quick_run_measures_every_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results" / "read.json"
    options = ["--quick", "--rounds", "2", "--patches", "2", "--dir", str(tmp_path), "--json", str(target)]
    assert read.main(options) == 0
    document = json.loads(target.read_text())
    assert set(document["forms"]) == {"ct", "window"}
    for results in document["forms"].values():
        assert list(results) == [peer.label for peer in stores.PEERS]
        assert all(len(result["whole"]) == len(result["patch"]) == 2 for result in results.values())
    assert str(tmp_path) not in target.read_text(), "results must not name paths"
    printed = capsys.readouterr().out
    assert all(peer.label in printed for peer in stores.PEERS)
    assert not (tmp_path / "read").exists()


def test_chunks_quick_run_prints_every_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results" / "chunks.md"
    assert chunks.main(["--quick", "--rounds", "1", "--dir", str(tmp_path), "--markdown", str(target)]) == 0
    assert target.read_text() == capsys.readouterr().out
    assert target.read_text().count("**default**") == 4


@pytest.fixture
def form() -> stores.Form:
    hounsfield = np.arange(18 * 20 * 22, dtype=np.int16).reshape(1, 18, 20, 22)
    return stores.Form("ct", "CT", hounsfield.astype(np.float32), hounsfield)


def test_a_wrong_or_shared_array_stops_the_benchmark(form: stores.Form) -> None:
    box = stores.whole(form.values.shape)
    read.check_exact(stores.MEMCPY, form, lambda _: form.values.copy(), box)
    wrong = form.values.copy()
    wrong[0, 0, 0, 0] = -0.0  # equals zero, but is another bit pattern
    with pytest.raises(AssertionError, match="differ"):
        read.check_exact(stores.MEMCPY, form, lambda _: wrong, box)
    with pytest.raises(AssertionError, match="source's own"):
        read.check_exact(stores.MEMCPY, form, lambda _: form.values, box)
    with pytest.raises(AssertionError, match="not an array"):
        read.check_exact(stores.MEMCPY, form, lambda _: form.values.astype(np.float64), box)


def test_random_boxes_are_inside_and_the_same_every_time() -> None:
    shape = (2, 10, 20, 12)
    boxes = arrays.random_boxes(shape, 10, 30)
    assert boxes == arrays.random_boxes(shape, 10, 30)
    assert len(set(boxes)) > 10
    for channels, *space in boxes:
        assert channels == (0, 2)
        assert all(stop - start == 10 for start, stop in space)
        assert all(start >= 0 and stop <= extent for (start, stop), extent in zip(space, shape[1:], strict=True))


def test_touched_chunks_are_those_that_hold_a_voxel_of_the_box() -> None:
    shape, chunk = (1, 9, 8, 10), (1, 4, 3, 5)
    counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    for box in arrays.random_boxes(shape, 4, 20):
        voxels = itertools.product(*(range(start, stop) for start, stop in box))
        held = {tuple(i // c for i, c in zip(voxel, chunk, strict=True)) for voxel in voxels}
        expected = sorted(int(np.ravel_multi_index(cell, counts)) for cell in held)
        assert limits.touched(box, shape, chunk) == expected


def test_decoded_voxels_per_voxel_asked_for() -> None:
    assert chunks.decoded_per_voxel((1, 8, 8, 8), (1, 8, 8, 8), 4) == 8.0
    assert chunks.decoded_per_voxel((1, 8, 8, 8), (1, 1, 1, 1), 4) == 1.0


def test_the_decoding_limit_decodes_the_chunks_of_the_box(form: stores.Form, tmp_path: Path) -> None:
    stores.ZCACHE.store(form, tmp_path)
    with stores.DECODING.open(form, tmp_path) as decode:
        decoded = decode(stores.whole(form.values.shape))
    assert set(form.plain.ravel().tolist()) <= set(decoded.tolist())


def test_one_parameter_is_varied_at_a_time() -> None:
    codes = np.random.default_rng(0).integers(0, 500, (1, 96, 96, 96), dtype=np.int16)
    default, *others = chunks.variants(codes)
    assert default.varied == ""
    for other in others:
        changed = [
            name
            for name, differs in {
                "chunk": other.chunk_kib != default.chunk_kib,
                "shuffle": other.codec.shuffle != default.codec.shuffle,
                "codec": (other.codec.cname, other.codec.clevel) != (default.codec.cname, default.codec.clevel),
            }.items()
            if differs
        ]
        assert changed == [other.varied]


def test_ratios_are_formed_within_rounds() -> None:
    # The second round was slow for everybody.
    assert read.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_goals_compare_with_the_limits() -> None:
    labels = {peer.label: read.Result(peer.label, 1, [4.0], [3.0]) for peer in stores.PEERS}
    labels[stores.ZCACHE.label] = read.Result("zcache", 1, [9.0], [1.0])
    found = {goal.text: goal for goal in read.goals(list(labels.values()))}
    assert found["patch: tensorstore, same files / zcache"].met
    whole = found["whole: zcache / (decoding + memcpy)"]
    assert (whole.value, whole.met) == (9 / 8, True)
