"""Whatever is wrong with a cache is found and named; repairing removes that and nothing else."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import zcache
from tests.inspection.caches import about, fill, item
from tests.support import files_under, key, same_bits
from zcache.inspection.verify import repair, verify


def verdicts(folder, n_threads=1):
    return {verdict.key: verdict for verdict in verify(zcache.open_cache(folder), n_threads)}


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def entry_path(folder, name="0" * 31 + "1"):
    return folder / "cache.zarr" / name


@pytest.fixture
def indexed(tmp_path, volumes):
    """An entry with an index of voxels."""
    from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandCropByPosNegLabeld  # noqa: PLC0415

    keys = ["image", "label"]
    crop = RandCropByPosNegLabeld(keys, "label", (16, 16, 16), num_samples=1)
    pipeline = Compose([LoadImaged(keys), EnsureChannelFirstd(keys), crop])
    with zcache.PersistentDataset(volumes[:1], pipeline, cache_dir=tmp_path / "cache") as ds:
        ds[0]
    return tmp_path / "cache"


def test_a_sound_cache(cache_dir):
    before = files_under(cache_dir)
    found = verdicts(cache_dir, n_threads=2)
    assert [v.status for v in found.values()] == ["ok"] * 3
    assert not any(v.findings for v in found.values())
    infos = zcache.open_cache(cache_dir).infos
    assert [v.checked_bytes for v in found.values()] == [info.stored_bytes for info in infos]
    assert files_under(cache_dir) == before


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", ["zarr.json", "image/c/0/0/0/0", "label/c/0/0/0/0"])
def test_a_flipped_bit_anywhere(cache_dir, name, part):
    path = entry_path(cache_dir) / name
    flip(path, int(part * (path.stat().st_size - 1)))
    found = verdicts(cache_dir)
    assert [v.status for v in found.values()] == ["damaged", "ok", "ok"]
    [finding] = found[key(1)].findings
    assert finding.where == ("" if name == "zarr.json" else name.partition("/")[0])
    assert finding.problem


def test_what_other_zarr_tools_read_is_checked_too(cache_dir):
    path = entry_path(cache_dir) / "image" / "zarr.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document, indent=2))  # the same, written otherwise
    assert verdicts(cache_dir)[key(1)].status == "ok"
    path.write_text(json.dumps({**document, "shape": [1]}))
    assert "other Zarr tools would misread it" in verdicts(cache_dir)[key(1)].findings[0].problem
    path.unlink()
    assert verdicts(cache_dir)[key(1)].findings[0].problem == "a file of it is missing"


def test_chunks_of_another_entry(cache_dir):
    shutil.copy(entry_path(cache_dir, key(2)) / "image/c/0/0/0/0", entry_path(cache_dir) / "image/c/0/0/0/0")
    assert verdicts(cache_dir)[key(1)].status == "damaged"


def test_what_is_missing_and_what_does_not_belong(cache_dir):
    (entry_path(cache_dir) / "label/c/0/0/0/0").unlink()
    (entry_path(cache_dir, key(2)) / "notes.txt").write_text("mine")
    (cache_dir / "cache.zarr" / "notes.txt").write_text("mine")
    found = verdicts(cache_dir)
    assert [(f.where, f.problem) for f in found[key(1)].findings] == [("label", "a file of it is missing")]
    assert [(f.where, f.problem) for f in found[key(2)].findings] == [
        ("notes.txt", "nothing of this name belongs into an entry")
    ]
    assert found[key(2)].status == "ok"
    assert zcache.open_cache(cache_dir).foreign == ("notes.txt",)


def test_repair_removes_what_is_damaged_and_nothing_else(cache_dir):
    flip(entry_path(cache_dir) / "image/c/0/0/0/0", 100)
    other = {"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": 2}}}
    (entry_path(cache_dir, key(2)) / "zarr.json").write_text(json.dumps(other))
    (cache_dir / "cache.zarr" / "notes.txt").write_text("mine")
    view = zcache.open_cache(cache_dir)
    found = list(verify(view))
    assert [v.status for v in found] == ["damaged", "unknown format", "ok"]
    assert [repair(view.store, v) for v in found] == [[key(1)], [], []]
    view.store.close()
    assert sorted(p.name for p in (cache_dir / "cache.zarr").iterdir()) == [key(2), "f" * 32, "notes.txt", "zarr.json"]
    assert list((cache_dir / "staging").iterdir()) == []
    fill(cache_dir, {key(1): item(1)})
    assert verdicts(cache_dir)[key(1)].status == "ok"


def test_repair_leaves_an_entry_that_was_replaced_meanwhile(cache_dir):
    flip(entry_path(cache_dir) / "image/c/0/0/0/0", 100)
    view = zcache.open_cache(cache_dir)
    [damaged] = [v for v in verify(view) if v.status == "damaged"]
    shutil.rmtree(entry_path(cache_dir))
    fill(cache_dir, {key(1): {**item(1), "id": "new"}})
    assert repair(view.store, damaged) == []
    assert zcache.open_cache(cache_dir)[key(1)].load()["id"] == "new"


def test_an_index_of_voxels(indexed):
    [entry] = zcache.open_cache(indexed).values()
    [index] = entry.info.indexes
    assert index.about["label"] == "label"
    folder = entry.path / index.name
    assert index.stored_bytes == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert "foreground, background of label" in repr(entry)
    assert verdicts(indexed)[entry.key].checked_bytes == entry.info.stored_bytes
    flip(folder / "bits/c/0/0", 30)
    view = zcache.open_cache(indexed)
    [verdict] = verify(view)
    assert (verdict.status, [(f.where, f.in_index) for f in verdict.findings]) == ("ok", [(index.name, True)])
    expected = entry.load()
    assert repair(view.store, verdict) == [f"{entry.key}/{index.name}"]
    view.store.close()
    assert not folder.exists()
    assert same_bits(entry.load()["image"], expected["image"])
    assert verdicts(indexed)[entry.key].findings == ()


def test_a_damaged_document_of_an_index(indexed):
    [entry] = zcache.open_cache(indexed).values()
    flip(entry.path / entry.info.indexes[0].name / "zarr.json", 200)
    [entry] = zcache.open_cache(indexed).values()
    assert entry.info.status == "ok"
    assert "checksum" in entry.info.indexes[0].problem
    [verdict] = verdicts(indexed).values()
    assert verdict.findings[0].in_index


def test_entries_that_go_while_they_are_checked(cache_dir):
    view = zcache.open_cache(cache_dir)
    assert len(view.infos) == 3
    checks = verify(view)
    assert next(checks).status == "ok"
    shutil.rmtree(entry_path(cache_dir, key(2)))
    assert [v.key for v in checks] == ["f" * 32]


def test_every_chunk_is_read(tmp_path):
    rng = np.random.default_rng(0)
    folder = fill(tmp_path / "cache", {key(1): {"x": rng.random((64, 64, 64))}}, about, chunks=(16, 16, 16))
    path = entry_path(folder) / "x/c/0/0/0"
    size = path.stat().st_size
    for at in range(0, size, size // 40):
        flip(path, at)
        assert verdicts(folder)[key(1)].status == "damaged"
        flip(path, at)
    assert verdicts(folder)[key(1)].status == "ok"
