"""CacheDataset and PersistentDataset(memory=): the samples of MONAI's CacheDataset, from memory that is shared."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import monai.data
import numpy as np
import pytest
import torch
from monai.data import Dataset, MetaTensor
from monai.data.utils import pickle_hashing
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    LoadImage,
    RandCropByLabelClassesd,
    RandFlip,
    RandSpatialCrop,
    ScaleIntensityRange,
)

from tests.strategies import assert_same
from tests.training.helpers import (
    KEYS,
    Counted,
    Draw,
    Shift,
    ct_pipeline,
    random_part,
    runs,
    sampling_part,
    without_ids,
)
from zcache import CacheConfigError, CacheDataset, PersistentDataset, ZCacheWarning

DATA = [{"x": float(i)} for i in range(6)]
CLASSES = [RandCropByLabelClassesd(KEYS, "label", (9, 8, 7), num_classes=3, num_samples=2)]


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def uncached(volumes) -> list[list[Any]]:
    """Two epochs of MONAI's plain data set, an item twice in each."""
    return epochs(monai.data.Dataset([*volumes, volumes[1]], Compose([*ct_pipeline(), *random_part()])), 2)


def files(base: Path) -> list[Path]:
    return sorted(p for p in base.glob("zcache-*/*") if p.name not in ("ledger", "in-use"))


def epochs(ds: Any, n: int = 3) -> list[list[Any]]:
    """Return the samples of several epochs, drawn from the same random state."""
    ds.transform.set_random_state(7)
    found = []
    for _ in range(n):
        found.append(without_ids([ds[i] for i in range(len(ds))]))
        if isinstance(ds, PersistentDataset):
            ds.flush()
    return found


def without_pixdim(samples: Any) -> Any:
    """Forget, in place, what MONAI's CacheDataset itself lets transforms change in its cache for later epochs."""
    for item in [item for epoch in samples for several in epoch for item in several]:
        for key in KEYS:
            del item[key].meta["pixdim"]
    return samples


def monais(data: Any, transform: Any, **kwargs: Any) -> Any:
    return monai.data.CacheDataset(data, transform, progress=False, **kwargs)


# --- the samples of MONAI's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"runtime_cache": False}, {}),
        ({"runtime_cache": False, "num_workers": None}, {}),
        ({"runtime_cache": "threads", "num_workers": 3}, {}),
        ({"runtime_cache": "processes"}, {}),
        ({"runtime_cache": []}, {}),
        ({"copy_cache": False}, {}),
        ({"copy_cache": False, "crop_pushdown": False}, {}),
        ({"as_contiguous": False}, {}),
        ({"cache_num": 3}, {"cache_num": 3}),
        ({"cache_num": 0}, {"cache_num": 0}),
        ({"cache_rate": 0.5, "runtime_cache": False}, {"cache_rate": 0.5}),
        ({"cache_rate": 0.9, "cache_num": 1}, {"cache_rate": 0.9, "cache_num": 1}),
        ({"cache_rate": 1.5, "cache_num": 2.0}, {"cache_rate": 1.5, "cache_num": 2.0}),
        ({"hash_as_key": True}, {"hash_as_key": True}),
        ({"hash_as_key": True, "cache_num": 2}, {"hash_as_key": True, "cache_num": 2}),
        (
            {"hash_as_key": True, "hash_func": pickle_hashing, "cache_rate": 0.8, "runtime_cache": False},
            {"hash_as_key": True, "cache_rate": 0.8},
        ),
    ],
)
def test_the_samples_are_those_of_monai(ours, theirs, uncached, volumes, base, tmp_path):
    data = [*volumes, volumes[1]]
    logs = [str(tmp_path / name) for name in ("ours", "theirs")]
    mine, its = ([Counted("image", log), *ct_pipeline(), *random_part()] for log in logs)
    with CacheDataset(data, mine, memory="64MiB", memory_dir=base, progress=False, **ours) as ds:
        reference = monais(data, its, **theirs)
        assert ds.cache_num == reference.cache_num
        found = epochs(ds, 2)
        assert_same(uncached, found)
        assert_same(without_pixdim(epochs(reference, 2)), without_pixdim(found))
        if "cache_num" in ours or "cache_rate" in ours:
            assert runs(logs[0]) <= runs(logs[1])  # equal items are computed and held once, whatever the options
        else:
            assert runs(logs[0]) == len(volumes)
        assert (ds.stats.damaged, ds.stats.read_errors, ds.stats.skipped, ds.stats.memory_refused) == (0, 0, {}, 0)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    "after", [sampling_part(), CLASSES, [], [Draw()]], ids=["samples", "classes", "nothing", "draw"]
)
def test_whatever_follows_the_samples_are_those_of_monai(after, volumes, base):
    data, steps = (DATA, [Shift()]) if after and type(after[0]) is Draw else (volumes, ct_pipeline(spacing=True))
    with CacheDataset(data, [*steps, *after], memory="64MiB", memory_dir=base) as ds:
        assert_same(epochs(monais(data, [*steps, *after])), epochs(ds))
        assert ds.stats.misses == len(data)
        assert ds.stats.memory_hits == 2 * len(data)


def test_items_that_are_no_dicts(volumes, base):
    data = [item["image"] for item in volumes]
    steps = [LoadImage(), EnsureChannelFirst(), ScaleIntensityRange(-57, 164, 0, 1, clip=True)]
    for after in ([RandSpatialCrop((9, 8, 7), random_size=False), RandFlip(0.5, 1)], [RandFlip(0.5, 0)]):
        with CacheDataset(data, Compose([*steps, *after]), memory="64MiB", memory_dir=base) as ds:
            assert_same(epochs(monais(data, Compose([*steps, *after]))), epochs(ds))
            assert ds.stats.memory_hits == 2 * len(data)


def test_negative_indices_slices_and_lists(volumes, base):
    steps = ct_pipeline()
    reference = without_ids(list(monais(volumes, steps)))
    for n in (None, 2):
        with CacheDataset(
            volumes, steps, memory="64MiB", memory_dir=base, **({} if n is None else {"cache_num": n})
        ) as ds:
            for _ in range(2):
                for i in (-1, -4, -3, 2):
                    assert_same(reference[i], without_ids(ds[i]))
                assert_same(reference[1:3], without_ids(list(ds[1:3])))
                assert_same(reference[::-2], without_ids(list(ds[::-2])))
                assert_same([reference[3], reference[0]], without_ids(list(ds[[3, 0]])))
                ds.flush()
            with pytest.raises(IndexError):
                ds[4]


@pytest.mark.parametrize("runtime_cache", [True, False])
def test_set_data_gives_other_items_and_keeps_those_of_before(runtime_cache, base, tmp_path):
    log = str(tmp_path / "log")
    steps = [Counted("x", log), Shift(), Draw()]
    ds = CacheDataset(
        DATA[:4],
        steps,
        cache_rate=0.5,
        memory="8MiB",
        memory_dir=base,
        progress=False,
        runtime_cache=runtime_cache,
    )
    reference = monais(DATA[:4], [Shift(), Draw()], cache_rate=0.5)
    for data, cached in ((DATA[:4], 2), (DATA, 3), (DATA[::-1], 3), (DATA[:4], 2)):
        ds.set_data(data)
        reference.set_data(data)
        assert len(ds) == len(data)
        assert ds.cache_num == reference.cache_num == cached
        assert_same(epochs(reference), epochs(ds))
    assert len(files(base)) == 6
    assert runs(log) == 6 + 3 * (2 + 3 + 3 + 2)  # the cached ones once, others in each of three epochs
    ds.close()


# --- filling up front ----------------------------------------------------------------------------------------------


def test_a_progress_bar_where_tqdm_is_installed(base, capfd):
    pytest.importorskip("tqdm")
    with CacheDataset(DATA, Shift(), memory="8MiB", memory_dir=base, runtime_cache=False) as ds:
        assert "Loading dataset: 100%" in capfd.readouterr().err
        assert ds.stats.memory_filled == len(DATA)
        with CacheDataset(DATA, Shift(), memory="8MiB", memory_dir=base, runtime_cache=False, progress=False):
            assert capfd.readouterr().err == ""


def test_without_tqdm_a_warning_and_no_bar(base, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.warns(ZCacheWarning, match="tqdm is not installed"):
        ds = CacheDataset(DATA, Shift(), memory="8MiB", memory_dir=base, runtime_cache=False)
    with ds:
        assert ds.stats.memory_filled == len(DATA)
        assert capfd.readouterr().err == ""


def test_filling_stops_when_memory_is_full(base, tmp_path):
    log = str(tmp_path / "log")
    data = [{"x": float(i)} for i in range(200)]
    with pytest.warns(ZCacheWarning, match="is full .*memory="):
        ds = CacheDataset(
            data,
            [Counted("x", log), Shift()],
            memory="64KiB",  # eight items of two pages
            memory_dir=base,
            runtime_cache=False,
            progress=False,
            max_pending_bytes="20KiB",
        )
    with ds:
        assert ds.stats.memory_filled == 8
        assert runs(log) < len(data)
        assert [float(item["x"][0]) for item in ds] == [d["x"] + 1 for d in data]
        assert ds.stats.memory_hits == 8


def test_each_rank_begins_to_fill_elsewhere(base, monkeypatch):
    """All begin with what the others will do last; together they compute everything once."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    order = []
    original = CacheDataset._fill_item
    monkeypatch.setattr(CacheDataset, "_fill_item", lambda self, i: (order.append(i), original(self, i))[1])
    CacheDataset(DATA, Shift(), memory="8MiB", memory_dir=base, runtime_cache=False, progress=False).close()
    assert order == [4, 5, 0, 1, 2, 3]


@pytest.fixture
def own_volumes(volumes, tmp_path) -> list[dict[str, str]]:
    """Copies of two volumes, to be edited and removed."""
    return [
        {name: shutil.copy(item[name], tmp_path / f"{i}-{name}.nii.gz") for name in KEYS}
        for i, item in enumerate(volumes[:2])
    ]


@pytest.mark.parametrize("gone", [KEYS, ["label"]])
@pytest.mark.parametrize("options", [{}, {"hash_as_key": True, "num_workers": 2}])
def test_filled_up_front_it_needs_the_files_no_longer(gone, options, own_volumes, base):
    """As with MONAI, whose default this is; a copy of the data set, as a worker has it, needs them no more either."""
    steps = [*ct_pipeline(), *random_part()]
    options = {"progress": False, "runtime_cache": False, **options}
    reference = monai.data.CacheDataset(own_volumes, steps, **options)
    with CacheDataset(own_volumes, steps, memory="64MiB", memory_dir=base, **options) as ds:
        for path in [item[name] for item in own_volumes for name in gone]:
            Path(path).unlink()
        expected = without_pixdim(epochs(reference, 2))
        assert_same(expected, without_pixdim(epochs(ds, 2)))
        assert_same(expected, without_pixdim(epochs(pickle.loads(pickle.dumps(ds)), 2)))
        assert (ds.stats.misses, ds.stats.memory_hits, ds.stats.pushed_down) == (0, 4, 4)


def test_filled_up_front_it_notices_edited_files_and_changed_transforms(own_volumes, base):
    steps = ct_pipeline()
    with CacheDataset(own_volumes, steps, memory="64MiB", memory_dir=base, progress=False, runtime_cache=False) as ds:
        shutil.copy(own_volumes[1]["image"], own_volumes[0]["image"])
        assert_same(without_ids(list(Dataset(own_volumes, Compose(steps)))), without_ids(list(ds)))
        assert ds.stats.misses == 1
        ds.transform = Compose(steps[:-1])
        Path(own_volumes[1]["image"]).unlink()
        with pytest.raises(RuntimeError, match="applying transform") as error:
            ds[1]
        assert "does not hold this item" in error.value.__notes__[-1]


def test_files_that_vanish_while_it_is_filled_on_the_fly(own_volumes, base):
    with CacheDataset(own_volumes, ct_pipeline(), memory="64MiB", memory_dir=base) as ds:
        ds[0]
        for item in own_volumes:
            Path(item["image"]).unlink()
        for i, item in enumerate(own_volumes):
            with pytest.raises(RuntimeError, match="applying transform") as error:
                ds[i]
            (note,) = error.value.__notes__
            assert note.startswith(f"{str(item['image'])!r} is not there. This CacheDataset is filled on the fly")
            assert "runtime_cache=False" in note


def test_files_that_vanish_though_memory_was_full(own_volumes, base):
    with pytest.warns(ZCacheWarning, match=r"memory="):
        ds = CacheDataset(
            own_volumes, ct_pipeline(), memory="8KiB", memory_dir=base, progress=False, runtime_cache=False
        )
    with ds:
        Path(own_volumes[0]["image"]).unlink()
        with pytest.raises(RuntimeError, match="applying transform") as error:
            ds[0]
        assert "no room for it in memory=" in error.value.__notes__[-1]


def test_an_error_that_has_nothing_to_do_with_files_gets_no_note(own_volumes, base):
    Path(own_volumes[1]["label"]).write_bytes(b"no volume")
    with CacheDataset(own_volumes, ct_pipeline(), memory="64MiB", memory_dir=base) as ds:
        with pytest.raises(RuntimeError) as error:
            ds[1]
        assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize("option", [{"cache_rate": -0.1}, {"cache_num": -1}])
def test_what_cannot_work_is_refused(option, base):
    with pytest.raises(CacheConfigError):
        CacheDataset(DATA, Shift(), memory_dir=base, **option)


# --- cases ---------------------------------------------------------------------------------------------------------


def test_case_04_miss_in_flight_memory_and_disk_are_the_same(volumes, base, tmp_path, gate):
    disk = tmp_path / "disk"
    with PersistentDataset(volumes, ct_pipeline(), disk, memory="64MiB", memory_dir=base, writers=1) as ds:
        miss = [ds[i] for i in range(2)]
        in_flight = [ds[i] for i in range(2)]
        assert ds.stats.inflight_hits == 2
        gate.set()
        ds.flush()
        memory = [ds[i] for i in range(2)]
        assert ds.stats.memory_hits == 2
    with PersistentDataset(volumes, ct_pipeline(), disk) as ds:
        stored = [ds[i] for i in range(2)]
        assert ds.stats.hits == 2
    for other in (in_flight, memory, stored):
        assert_same(miss, other)
    assert type(memory[0]["image"]) is MetaTensor


@pytest.mark.parametrize("copy_cache", [True, False])
def test_case_09_what_is_done_to_an_item_is_not_seen_in_the_next_epoch(copy_cache, volumes, base):
    with CacheDataset(volumes, ct_pipeline(spacing=True), memory="64MiB", memory_dir=base, copy_cache=copy_cache) as ds:
        expected = without_ids(list(monais(volumes, ct_pipeline(spacing=True))))
        for _ in range(3):
            items = list(ds)
            assert_same(expected, without_ids(items))
            for item in items:
                item["image"] += 1
                item["label"][...] = 9
                item["image"].meta["added"] = "x"
                item["image"].applied_operations.append({"class": "Nothing"})
                del item["label"].meta["filename_or_obj"]
            ds.flush()
        assert ds.stats.memory_hits == 8


def test_case_24_memory_holds_the_narrow_types_once(volumes, base):
    with (
        CacheDataset(volumes, ct_pipeline(), memory="64MiB", memory_dir=base) as a,
        CacheDataset(volumes, [*ct_pipeline(), *sampling_part()], memory="64MiB", memory_dir=base) as b,
    ):
        floats = sum(item[name].numel() * 4 for item in a for name in KEYS)
        a.flush()
        list(b)
        assert b.stats.memory_hits == 4
        assert len(files(base)) == 4
        # codes of one byte for each label, of one or two for each windowed image
        assert floats / 4 < sum(f.stat().st_size for f in files(base)) < floats / 4 * 1.6


@pytest.mark.parametrize("crop", [random_part()[:1], CLASSES])
@pytest.mark.parametrize("disk", [True, False])
def test_the_index_of_a_label_guided_crop_lies_in_memory(crop, disk, volumes, base, tmp_path):
    steps = [*ct_pipeline(), *crop]
    expected = epochs(monais(volumes, steps), 2)
    place = {"memory": "64MiB", "memory_dir": base}
    with PersistentDataset(volumes, steps, tmp_path / "disk" if disk else None, **place) as ds:
        assert_same(expected, epochs(ds, 2))
        assert (ds.stats.pushed_down, ds.stats.memory_hits, ds.stats.read_whole) == (4, 4, {})
        assert len(files(base)) == 8
        assert sum(".voxels-" in f.name for f in files(base)) == 4
    if not disk:
        return
    with PersistentDataset(volumes, steps, tmp_path / "disk", read_only=True, **place) as ds:  # copied from the disk
        assert_same(expected, epochs(ds, 2))
        assert (ds.stats.hits, ds.stats.memory_hits, ds.stats.pushed_down) == (4, 4, 8)
        assert (ds.stats.read_whole, ds.stats.memory_filled) == ({}, 8)
        assert sum(".voxels-" in f.name for f in files(base)) == 4


@pytest.mark.parametrize("after", [[], random_part(), sampling_part()])
def test_case_25_a_second_run_fills_memory_from_disk_without_a_transform(after, volumes, base, tmp_path):
    log = str(tmp_path / "log")
    steps = [Counted("image", log), *ct_pipeline(), *after]
    found = []
    for _ in range(2):
        with PersistentDataset(volumes, steps, tmp_path / "disk", memory="64MiB", memory_dir=base) as ds:
            found.append(epochs(ds, 2))
            stats = ds.stats
        assert list(base.iterdir()) == []
    assert runs(log) == len(volumes)
    assert (stats.misses, stats.hits, stats.memory_hits) == (0, 4, 4)
    assert_same(*found)


def test_case_25_kept_memory_serves_the_next_run_without_a_transform(volumes, base, tmp_path):
    log = str(tmp_path / "log")
    steps = [Counted("image", log), *ct_pipeline(), *random_part()]
    found = []
    for _ in range(2):
        with CacheDataset(volumes, steps, memory="64MiB", memory_dir=base, keep_memory=True) as ds:
            found.append(epochs(ds, 2))
    assert runs(log) == len(volumes)
    assert (ds.stats.misses, ds.stats.memory_hits) == (0, 8)
    assert_same(*found)
    with CacheDataset(volumes, steps, memory="64MiB", memory_dir=base):
        pass
    assert list(base.iterdir()) == []


# --- memory in front of the disk -----------------------------------------------------------------------------------


def test_memory_in_front_of_the_disk_gives_what_the_disk_gives(volumes, base, tmp_path):
    steps = [*ct_pipeline(), *random_part()]
    with (
        PersistentDataset(volumes, steps, tmp_path / "a", memory="64MiB", memory_dir=base) as with_memory,
        PersistentDataset(volumes, steps, tmp_path / "b") as without,
    ):
        assert_same(epochs(without), epochs(with_memory))
        assert (with_memory.stats.memory_hits, with_memory.stats.hits) == (8, 0)
        assert with_memory.stats.stored == without.stats.stored == 4
        assert with_memory.stats.stored_bytes == without.stats.stored_bytes


def test_a_damaged_item_on_disk_is_not_believed_because_memory_is_there(volumes, base, tmp_path, heard):
    with PersistentDataset(volumes, ct_pipeline(), tmp_path / "disk") as ds:
        expected = ds[0]
    shard = next(p for p in (tmp_path / "disk").glob("cache.zarr/*/image/c/**/0") if p.is_file())
    shard.write_bytes(shard.read_bytes()[:-20])
    with PersistentDataset(volumes, ct_pipeline(), tmp_path / "disk", memory="64MiB", memory_dir=base) as ds:
        assert_same(expected, ds[0])
        ds.flush()
        assert_same(expected, ds[0])
        assert (ds.stats.damaged, ds.stats.misses, ds.stats.memory_hits) == (1, 1, 1)
        assert not [f for f in files(base) if f.suffix == ".part"]
    assert len(heard) == 1


def test_an_item_larger_than_memory_is_served_from_disk(volumes, base, tmp_path):
    with PersistentDataset(volumes, ct_pipeline(), tmp_path / "disk", memory="64KiB", memory_dir=base) as ds:
        assert_same(*epochs(ds, 2))
        assert (ds.stats.hits, ds.stats.memory_hits) == (4, 0)
        assert files(base) == []


def test_lossy_items_are_the_same_in_every_epoch(volumes, base):
    with CacheDataset(volumes, ct_pipeline(spacing=True), memory="64MiB", memory_dir=base, precision=1e-3) as ds:
        first, second = epochs(ds, 2)
        assert_same(first, second)
        exact = monais(volumes, ct_pipeline(spacing=True))
        for a, b in zip(exact, first, strict=True):
            assert 0 < float((a["image"] - b["image"]).abs().max()) <= 1e-3
            assert torch.equal(a["label"].as_tensor(), b["label"].as_tensor())


def test_arrays_stay_arrays_and_are_the_callers(base):
    data = [{"x": np.random.default_rng(0).random((20, 30, 40))}]
    with CacheDataset(data, [Counted("x", "/dev/null")], memory="8MiB", memory_dir=base) as ds:
        for _ in range(3):
            item = ds[0]
            assert type(item["x"]) is np.ndarray
            assert item["x"].tobytes() == data[0]["x"].tobytes()
            item["x"][...] = 0
            ds.flush()
        assert ds.stats.memory_hits == 2
