"""Which entries are stale: only what is known to have changed, never what is merely out of reach."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged

import zcache
from tests.inspection.caches import fill
from tests.support import key
from zcache.inspection.prune import candidates, plan
from zcache.inspection.stale import Freshness, Sources, Stamp, judge, read_stamps
from zcache.keys import source_stamps

NOTED = st.tuples(st.integers(0, 3), st.integers(0, 3))
FOUND = st.one_of(NOTED, st.sampled_from(["gone", "out of reach"]))


@given(st.lists(st.tuples(NOTED, FOUND), max_size=5))
def test_stale_is_what_has_a_source_that_is_known_to_be_another(rows):
    stamps = [Stamp(f"/{i}", noted) for i, (noted, _) in enumerate(rows)]
    now = {f"/{i}": found for i, (_, found) in enumerate(rows)}
    judged = judge(stamps, lambda one: now[one.path])
    other = [f"/{i}" for i, (noted, found) in enumerate(rows) if found not in (noted, "out of reach")]
    away = [f"/{i}" for i, (_, found) in enumerate(rows) if found == "out of reach"]
    if other:
        assert judged.status == "stale"
        assert [reason.partition(" ")[0] for reason in judged.reasons] == other
    elif away or not rows:
        assert judged.status == "unknown"
        assert len(judged.reasons) == len(away)
    else:
        assert judged == Freshness("fresh")


@given(st.lists(NOTED, max_size=5))
def test_what_is_out_of_reach_never_makes_an_entry_stale(rows):
    stamps = [Stamp(f"/{i}", noted) for i, noted in enumerate(rows)]
    assert judge(stamps, lambda _: "out of reach").status == "unknown"


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        [],
        {},
        7,
        "text",
        [3],
        [{"path": "a"}],
        [{"path": 3, "size": 1, "mtime_ns": 2}],
        [{"path": "a", "size": "much", "mtime_ns": 2}],
        [{"path": "a", "size": 1, "mtime_ns": None}],
        [{"path": "a", "size": 1, "mtime_ns": 2}, None],
    ],
)
def test_records_that_are_malformed_say_nothing(recorded):
    assert read_stamps(recorded) == ()


def file(path) -> Stamp:
    return Stamp(str(path), (0, 0))


def test_what_is_found(tmp_path):
    data = tmp_path / "data"
    (data / "empty").mkdir(parents=True)
    (data / "a.nii").write_bytes(b"123")
    os.utime(data / "a.nii", ns=(5, 5))
    look = Sources(data).look
    assert look(file("a.nii")) == look(file(data / "a.nii")) == (3, 5)
    assert look(file("gone.nii")) == "gone"
    away = (
        "empty/a.nii",
        "nowhere/a.nii",
        "a.nii/b",
        "../data/a.nii",
        "x\0y",
        "/nowhere/a.nii",
        "x" * 300,
        "empty",
        "",
    )
    for path in away:
        assert look(file(path)) == "out of reach"
    assert Sources().look(file("a.nii")) == "out of reach"
    with pytest.raises(zcache.CacheConfigError, match="is not a folder"):
        Sources(tmp_path / "nothing")


def test_folders_are_compared_by_all_that_is_in_them(tmp_path):
    folder = tmp_path / "series"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.dcm").write_bytes(b"1")
    [one] = read_stamps(source_stamps([folder]))
    assert one.noted[0] == 3
    assert judge([one], Sources().look).status == "fresh"
    (folder / "1.dcm").write_bytes(b"12")
    assert judge([one], Sources().look).status == "stale"


def test_of_a_folder_no_more_is_listed_than_the_entry_says_it_held(tmp_path, monkeypatch):
    for i in range(9):
        (tmp_path / f"{i}.dcm").write_bytes(b"")
    asked = []
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, *args, **kwargs: asked.append(path) or real(path, *args, **kwargs))
    assert Sources().look(Stamp(str(tmp_path), (2, "digest")))[0] == 3
    assert len(asked) <= 5
    asked.clear()
    assert Sources().look(Stamp("/", (10**9, "digest"))) == "out of reach"
    assert asked == []


def test_each_file_is_asked_for_once(tmp_path):
    path = tmp_path / "a.nii"
    path.write_bytes(b"1")
    sources = Sources()
    before = sources.look(file(path))
    path.write_bytes(b"22")
    assert sources.look(file(path)) == before
    assert Sources().look(file(path)) != before


@pytest.fixture
def trained(tmp_path, volumes):
    """Two patients in a folder of their own, loaded with root=."""
    data = tmp_path / "data"
    data.mkdir()
    copied = [{name: shutil.copy2(path, data / Path(path).name) for name, path in item.items()} for item in volumes[:2]]
    return tmp_path / "cache", copied


PIPELINE = Compose([LoadImaged(["image", "label"]), EnsureChannelFirstd(["image", "label"])])


def train(cache, items, **kwargs):
    with zcache.PersistentDataset(items, PIPELINE, cache_dir=cache, **kwargs) as ds:
        for i in range(len(ds)):
            ds[i]


def statuses(cache, root=None) -> list[str]:
    sources = Sources(root)
    infos = sorted(zcache.open_cache(cache).infos, key=lambda info: info.source)
    return [judge(info.stamps, sources.look).status for info in infos]


def test_what_a_dataset_writes_is_fresh_until_a_file_is_changed(trained):
    cache, items = trained
    train(cache, items)
    assert statuses(cache) == ["fresh", "fresh"]
    os.utime(items[1]["label"])
    assert statuses(cache) == ["fresh", "stale"]
    Path(items[0]["image"]).unlink()
    assert statuses(cache) == ["stale", "stale"]
    train(cache, items[1:])  # computed anew, beside the old one
    assert sorted(statuses(cache)) == ["fresh", "stale", "stale"]
    chosen = plan(candidates(zcache.open_cache(cache), sources=Sources()), stale=True)
    assert sorted(removal.reason for removal in chosen) == [
        f"{items[0]['image']} is gone",
        f"{items[1]['label']} was changed",
    ]
    assert plan(candidates(zcache.open_cache(cache)), stale=True) == []  # nobody looked


def test_paths_below_a_root_are_looked_for_where_it_is_now(trained, tmp_path):
    cache, items = trained
    train(cache, items, root=tmp_path / "data")
    assert [[s.path for s in info.stamps] for info in zcache.open_cache(cache).find("image0").infos] == [
        ["image0.nii.gz", "label0.nii.gz"]
    ]
    assert statuses(cache) == ["unknown", "unknown"]
    assert statuses(cache, tmp_path / "data") == ["fresh", "fresh"]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    assert statuses(cache, tmp_path / "data") == ["unknown", "unknown"]  # an empty folder: nothing is mounted there
    assert statuses(cache, tmp_path / "elsewhere") == ["fresh", "fresh"]


def test_a_disk_that_is_not_mounted_makes_nothing_stale(trained, tmp_path):
    cache, items = trained
    train(cache, items)
    (tmp_path / "data").rename(tmp_path / "away")
    assert statuses(cache) == ["unknown", "unknown"]
    (tmp_path / "data").mkdir()
    assert statuses(cache) == ["unknown", "unknown"]


def test_without_a_record_nothing_is_known(trained, tmp_path):
    cache, items = trained
    train(cache, items, check_sources=False)
    assert statuses(cache) == ["unknown", "unknown"]
    fill(tmp_path / "other", {key(1): {"x": np.zeros(3)}})
    assert statuses(tmp_path / "other") == ["unknown"]


def test_the_record_is_not_part_of_the_key(trained):
    cache, items = trained
    train(cache, items)
    keys = set(zcache.open_cache(cache))
    with zcache.PersistentDataset(items, PIPELINE, cache_dir=cache) as ds:
        for i in range(len(ds)):
            ds[i]
        assert (ds.stats.hits, ds.stats.misses) == (2, 0)
    assert set(zcache.open_cache(cache)) == keys
