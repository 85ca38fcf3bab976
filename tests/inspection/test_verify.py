"""Whatever is wrong with a cache is found and named; repairing removes that and nothing else."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import zcache
from tests.inspection.caches import about, fill, item
from tests.support import files_under, key, same_bits
from zcache.encoding.layout import parse_entry
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


WHERE = {"zarr.json": "", "image/c/0/0/0/0": "image", "labels/label/0/c/0/0/0/0": "label"}


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", WHERE)
def test_a_flipped_bit_anywhere(cache_dir, name, part):
    path = entry_path(cache_dir) / name
    flip(path, int(part * (path.stat().st_size - 1)))
    found = verdicts(cache_dir)
    assert [v.status for v in found.values()] == ["damaged", "ok", "ok"]
    [finding] = found[key(1)].findings
    assert finding.where == WHERE[name]
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


@pytest.mark.parametrize(("name", "where"), [("labels", "labels"), ("labels/label", "labels/label")])
def test_what_viewers_read_of_labels_is_checked_too(cache_dir, name, where):
    path = entry_path(cache_dir) / name / "zarr.json"
    sound = path.read_text()
    path.write_text(sound.replace("0.5", "0.6"))
    [finding] = verdicts(cache_dir)[key(1)].findings
    assert (finding.where, "would misread it" in finding.problem) == (where, True)
    path.unlink()
    assert verdicts(cache_dir)[key(1)].findings[0].problem == "a file of it is missing"
    path.write_text(sound)
    (path.parent / "more").mkdir()
    [finding] = verdicts(cache_dir)[key(1)].findings
    assert (finding.where, finding.problem) == (f"{name}/more", "nothing of this name belongs into an entry")


def test_a_missing_group_of_labels_is_damage_of_each_and_the_rest_is_checked(cache_dir):
    shutil.rmtree(entry_path(cache_dir) / "labels")
    (entry_path(cache_dir) / "notes.txt").write_text("mine")
    found = verdicts(cache_dir)[key(1)]
    assert found.status == "damaged"
    assert [f.where for f in found.findings] == ["label", "labels", "labels/label", "notes.txt"]


def test_chunks_of_another_entry(cache_dir):
    shutil.copy(entry_path(cache_dir, key(2)) / "image/c/0/0/0/0", entry_path(cache_dir) / "image/c/0/0/0/0")
    assert verdicts(cache_dir)[key(1)].status == "damaged"


def test_what_is_missing_and_what_does_not_belong(cache_dir):
    (entry_path(cache_dir) / "labels/label/0/c/0/0/0/0").unlink()
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


def shards_of(folder) -> list[Path]:
    return sorted(path for path in folder.rglob("0") if path.is_file())


@pytest.fixture(params=["generated", "real"])
def scanned(request, tmp_path):
    """A CT with a label that is empty, cached by a data set; a real one where there is one."""
    from monai.transforms import Compose, EnsureChannelFirstd, Lambdad, LoadImaged  # noqa: PLC0415

    if request.param == "real":
        item = {"image": str(request.getfixturevalue("shared_data") / "ct_torso_3mm.nii.gz")}
    else:
        item = {"image": request.getfixturevalue("volumes")[0]["image"]}
    item["label"] = item["image"]
    keys = ["image", "label"]
    pipeline = Compose([LoadImaged(keys), EnsureChannelFirstd(keys), Lambdad("label", lambda x: x * 0)])
    with zcache.PersistentDataset([item], pipeline, tmp_path / "cache", chunks=(16, 16, 16), check_sources=False) as ds:
        computed = ds[0]
    return tmp_path / "cache", computed


def test_case_06_a_lost_chunk_is_no_fill_value(scanned):
    folder, computed = scanned
    [entry] = zcache.open_cache(folder).values()
    assert entry.info.status == "ok"
    assert (
        verdicts(folder)[entry.key].findings == ()
    )  # a label of nothing but zeros is valid, though no chunk is stored
    assert not entry.read("label").any()
    assert same_bits(entry.read("image"), computed["image"].numpy())
    image = next(path for path in shards_of(entry.path) if "image" in path.parts)
    whole = image.read_bytes()
    record = parse_entry((entry.path / "zarr.json").read_bytes()).arrays["image"]
    index_bytes = (
        16 * math.prod(-(-n // c) for n, c in zip(record.grid.shape, record.grid.chunk_shape, strict=True)) + 4
    )
    places = np.frombuffer(whole[-index_bytes:-4], "<u8").reshape(-1, 2)
    at, nbytes = next((int(a), int(n)) for a, n in places if n < 1 << 60)
    for damaged in (
        whole[:at] + bytes(nbytes) + whole[at + nbytes :],  # zeroed
        whole[:at] + whole[at + nbytes :],  # cut out
        whole[:-index_bytes] + b"\xff" * 16 + whole[-index_bytes + 16 :],  # said to be the fill value
        b"",
    ):
        image.write_bytes(damaged)
        found = verdicts(folder)[entry.key]
        assert (found.status, [f.where for f in found.findings]) == ("damaged", ["image"])
        with pytest.raises(zcache.EntryDamagedError):
            zcache.open_cache(folder)[entry.key].read("image")
    image.unlink()
    assert verdicts(folder)[entry.key].status == "damaged"
    image.write_bytes(whole)
    assert verdicts(folder)[entry.key].findings == ()


def test_case_36_an_unknown_format_is_listed_and_left_alone(cache_dir):
    other = {"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": 99}}}
    (entry_path(cache_dir) / "zarr.json").write_text(json.dumps(other))
    with (
        zcache.Cache(cache_dir, read_only=True) as cache,
        pytest.warns(zcache.ZCacheWarning, match="is not that of a zcache entry of format 1"),
    ):
        assert cache.get(key(1), "a miss") == "a miss"
    view = zcache.open_cache(cache_dir)
    assert [info.status for info in view.infos] == ["unknown format", "ok", "ok"]
    before = files_under(cache_dir)
    [found] = [verdict for verdict in verify(view) if verdict.findings]
    assert (found.key, found.status) == (key(1), "unknown format")
    assert found.findings[0].problem == "it has format 99; this zcache reads format 1"
    assert repair(view.store, found) == []  # it may be another version's, and sound
    assert files_under(cache_dir) == before
    assert "unknown format: it has format 99" in repr(view)
