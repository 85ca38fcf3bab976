"""The tier in memory: the same bits as from disk, in one copy, filled from whatever comes, and never in the way."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import assert_same, trees
from zcache.cache import Cache
from zcache.encoding.payload import EncodedItem
from zcache.errors import CacheConfigError, CacheWriteError, ZCacheWarning
from zcache.storage import ram, shm
from zcache.storage.ledger import Ledger
from zcache.storage.ram import MemorySettings

KEY = "0123456789abcdef" * 2


def key(i):
    return f"{i:032x}"


def ct(i=0, n=24):
    return np.random.default_rng(i).integers(-1000, 1500, (1, n, n, n)).astype("f4")


def opened(base, disk=None, memory="64MiB", **kwargs):
    base.mkdir(exist_ok=True)
    return Cache(disk, memory=memory, memory_dir=base, **kwargs)


def files(base):
    return sorted(p for p in base.glob("zcache-*/*") if p.name not in ("ledger", "in-use"))


@given(item=trees())
@settings(max_examples=60)
def test_case_04_a_miss_a_read_in_flight_disk_and_memory_give_the_same(item, tmp_path_factory):
    path = tmp_path_factory.mktemp("same")
    with opened(path / "shm", path / "disk") as cache:
        miss = cache.put(KEY, item)
        assert_same(miss, item)
        assert_same(cache.get(KEY), miss)
        cache.flush()
        assert_same(cache.get(KEY), miss)
    with opened(path / "shm", path / "disk") as cache:
        assert_same(cache.get(KEY), miss)  # from disk
        assert_same(cache.get(KEY), miss)
        stats = cache.stats
        assert (stats.hits, stats.memory_hits, stats.memory_filled) == (1, 1, 1)
    with opened(path / "shm") as cache:
        cache.put(KEY, item)
        cache.flush()
        assert_same(cache.get(KEY), miss)
        assert (cache.stats.memory_hits, cache.stats.stored) == (1, 0)


def test_memory_holds_the_narrow_types(tmp_path):
    with opened(tmp_path / "shm") as cache:
        cache.put(KEY, {"image": ct(), "label": np.ones((24, 24, 24))})
        cache.flush()
        (file,) = files(tmp_path / "shm")
        assert file.name == KEY
        assert 24**3 * 3 < file.stat().st_size < 24**3 * 3 + 1024  # int16 and uint8


@given(data=st.data())
@settings(max_examples=80)
def test_boxes_are_parts_of_the_whole(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("boxes")
    arrays = {
        "cast": ct(1, 12),
        "table": (ct(2, 12) / 2500).astype("f4"),
        "plain": np.random.default_rng(3).random((1, 12, 12, 12)),
        "wide": (ct(5, 12).astype("i8") * 2**40),
    }
    with opened(path / "shm") as cache:
        cache.put(KEY, arrays)
        cache.flush()
        for _ in range(5):
            name = data.draw(st.sampled_from(sorted(arrays)))
            region = []
            for n in arrays[name].shape:
                start = data.draw(st.integers(0, n - 1))
                region.append((start, data.draw(st.integers(start + 1, n))))
            box = cache.get_region(KEY, name, tuple(region))
            expected = arrays[name][tuple(slice(*r) for r in region)]
            assert box.dtype == expected.dtype
            assert box.flags.c_contiguous
            assert box.tobytes() == expected.tobytes()
        with pytest.raises(IndexError):
            cache.get_region(KEY, "cast", ((0, 1), (0, 13), (0, 1), (0, 1)))


def test_case_09_what_comes_from_memory_belongs_to_the_caller(tmp_path):
    with opened(tmp_path / "shm") as cache:
        cache.put(KEY, {"image": ct(), "plain": np.random.default_rng(0).random((9, 9, 9)), "meta": {"a": [1]}})
        cache.flush()
        for _ in range(3):
            item = cache.get(KEY)
            np.testing.assert_array_equal(item["image"], ct())
            np.testing.assert_array_equal(item["plain"], np.random.default_rng(0).random((9, 9, 9)))
            assert item["meta"] == {"a": [1]}
            item["image"] += 1
            item["plain"][...] = 0
            item["meta"]["a"].append(2)


def test_without_copies_plain_arrays_are_views_that_nobody_else_sees_written(tmp_path):
    plain = np.random.default_rng(0).random((30, 30, 30))
    with opened(tmp_path / "shm", copy_cache=False) as cache:
        cache.put(KEY, {"plain": plain, "image": ct()})
        cache.flush()
        a, b = cache.get(KEY), cache.get(KEY)
        assert not a["plain"].flags.owndata
        a["plain"][...] = 0
        a["image"] += 1
        np.testing.assert_array_equal(b["plain"], plain)
        np.testing.assert_array_equal(cache.get(KEY)["plain"], plain)
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
    np.testing.assert_array_equal(b["plain"], plain)  # after the memory was given back


def test_case_25_memory_is_filled_from_disk(tmp_path):
    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        for i in range(3):
            cache.put(key(i), {"image": ct(i)})
    assert files(tmp_path / "shm") == []
    with opened(tmp_path / "shm", tmp_path / "disk", read_only=True) as cache:
        for _ in range(2):
            for i in range(3):
                np.testing.assert_array_equal(cache.get(key(i))["image"], ct(i))
        stats = cache.stats
        assert (stats.hits, stats.memory_hits, stats.misses, stats.memory_filled) == (3, 3, 0, 3)


def test_a_part_that_is_read_brings_the_whole_item_into_memory(tmp_path):
    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        cache.put(KEY, {"image": ct()})
    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        region = ((0, 1), (3, 5), (0, 24), (7, 9))
        for _ in range(2):
            np.testing.assert_array_equal(cache.get_region(KEY, "image", region), ct()[:, 3:5, :, 7:9])
        assert (cache.stats.hits, cache.stats.memory_hits) == (1, 1)


def test_two_caches_and_another_process_share_one_copy(tmp_path):
    with opened(tmp_path / "shm") as a, opened(tmp_path / "shm") as b:
        a.put(KEY, {"image": ct()})
        a.flush()
        np.testing.assert_array_equal(b.get(KEY)["image"], ct())
        pid = os.fork()
        if pid == 0:
            same = np.array_equal(a.get(KEY)["image"], ct())
            a.put(key(7), {"image": ct(7)})
            a.close()
            os._exit(0 if same else 1)
        assert os.waitpid(pid, 0)[1] == 0
        np.testing.assert_array_equal(a.get(key(7))["image"], ct(7))
        assert len(files(tmp_path / "shm")) == 2


def test_memory_that_was_given_up_is_unmapped_with_the_next_read(tmp_path):
    def mapped():
        return sum(KEY in line and "deleted" in line for line in Path("/proc/self/maps").read_text().splitlines())

    with opened(tmp_path / "shm") as a, opened(tmp_path / "shm") as b:
        a.put(KEY, {"image": ct()})
        a.put(key(1), {"image": ct(1)})
        a.flush()
        b.get(KEY)
        a._ram.forget(KEY)
        assert mapped() == 1
        b.get(key(1))
        assert mapped() == 0
        assert b.get(KEY, None) is None


@pytest.mark.parametrize("change", ["cut", "long", "zero", "head", "empty"])
def test_damaged_files_are_noticed_removed_and_filled_anew(tmp_path, change, heard):
    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        cache.put(KEY, {"image": ct()})
        cache.flush()
        (file,) = files(tmp_path / "shm")
        data = file.read_bytes()
        file.write_bytes(
            {"cut": data[:-9], "long": data + b"x", "zero": bytes(len(data)), "head": b"?" + data[1:], "empty": b""}[
                change
            ]
        )
        os.utime(file)
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
        assert (cache.stats.damaged, cache.stats.hits, cache.stats.memory_hits) == (1, 1, 1)
        assert files(tmp_path / "shm")[0].read_bytes() == data
    assert [w.category for w in heard] == [ZCacheWarning]
    assert "filled anew" in str(heard[0].message)


def test_an_item_whose_payload_and_arrays_disagree_is_dropped_from_memory(tmp_path, heard):
    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        cache.put(KEY, {"image": ct()})
        cache.flush()
        cache._ram.forget(KEY)
        cache._ram.fill(KEY, EncodedItem({"image": {"$ndarray": {"dtype": "<f4", "shape": [5], "array": "x"}}}, ()), {})
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
        assert (cache.stats.damaged, cache.stats.hits) == (1, 1)
    assert len(heard) == 1


def test_case_20_more_than_the_file_system_holds_degrades_to_disk_with_one_warning(tmp_path, monkeypatch, heard):
    class Small:
        f_blocks, f_frsize = 64 * 1024, 1024  # 64 MiB, as in a container
        f_bavail = 17 * 1024

    monkeypatch.setattr(shm.os, "fstatvfs", lambda _: Small)
    with opened(tmp_path / "shm", tmp_path / "disk", memory="8GiB") as cache:
        for i in range(8):
            cache.put(key(i), {"image": np.random.default_rng(i).random((1, 60, 60, 60))})  # 1.7 MB each; 1 MiB is free
        cache.flush()
        for i in range(8):
            assert cache.get(key(i))["image"][0, 0, 0, 0] == np.random.default_rng(i).random()
        assert (cache.stats.hits, cache.stats.memory_hits) == (8, 0)
    assert [w.category for w in heard] == [ZCacheWarning]
    assert "--shm-size" in str(heard[0].message)


def test_no_memory_left_while_it_is_written_is_warned_of_once_and_costs_nothing(tmp_path, monkeypatch, heard):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path / "shm", tmp_path / "disk") as cache:
        with monkeypatch.context() as m:
            m.setattr(shm.os, "pwrite", full)
            m.setattr(Ledger, "write", lambda *_: None)
            for i in range(3):
                cache.put(key(i), {"image": ct(i)})
            cache.flush()
        for i in range(3):
            np.testing.assert_array_equal(cache.get(key(i))["image"], ct(i))
        assert (cache.stats.stored, cache.stats.hits, cache.stats.memory_refused) == (3, 3, 3)
    assert len(heard) == 1
    assert "No space left" in str(heard[0].message)


def test_a_place_that_cannot_be_trusted_turns_memory_off_with_a_warning_or_raises(tmp_path):
    with opened(tmp_path / "shm") as cache:
        path = cache._ram._directory.path
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    with pytest.warns(ZCacheWarning, match="nothing is cached in memory.*memory_dir="):
        cache = opened(tmp_path / "shm", tmp_path / "disk")
    with cache:
        cache.put(KEY, {"image": ct()})
        cache.flush()
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
        assert cache.stats.hits == 1
    with pytest.raises(CacheWriteError, match="memory_dir="):
        opened(tmp_path / "shm", tmp_path / "disk", on_error="raise")
    assert list(path.iterdir()) == []


def test_an_item_larger_than_the_budget_is_computed_each_time_and_said_so_once(tmp_path, heard):
    with opened(tmp_path / "shm", memory="20KiB") as cache:
        for i in range(3):
            cache.put(key(i), {"image": ct(i)})
            cache.flush()
        assert cache.get(key(0), None) is None
        assert (cache.stats.misses, cache.stats.memory_refused) == (1, 3)
    assert [w.category for w in heard] == [ZCacheWarning]
    assert "memory=" in str(heard[0].message)


def test_a_budget_in_front_of_a_disk_is_no_reason_to_warn(tmp_path):
    with warnings.catch_warnings(), opened(tmp_path / "shm", tmp_path / "disk", memory="20KiB") as cache:
        warnings.simplefilter("error")
        cache.put(KEY, {"image": ct()})
        cache.flush()
        np.testing.assert_array_equal(cache.get(KEY)["image"], ct())
        assert cache.stats.memory_refused == 2


def test_the_budget_is_kept_and_old_items_give_way(tmp_path):
    with opened(tmp_path / "shm", tmp_path / "disk", memory="100KiB", keep_memory=True) as cache:
        for i in range(3):
            cache.put(key(i), {"image": ct(i)})  # 28 KiB each
            cache.flush()
    with opened(tmp_path / "shm", tmp_path / "disk", memory="100KiB") as cache:
        cache.put(key(9), {"image": ct(9)})
        cache.flush()
        assert cache.stats.memory_evicted == 1
        assert sum(f.stat().st_size for f in files(tmp_path / "shm")) <= 100 * 1024
        for i in (0, 1, 2, 9):
            np.testing.assert_array_equal(cache.get(key(i))["image"], ct(i))


def test_lossy_items_are_the_same_from_memory(tmp_path):
    image = np.random.default_rng(0).random((1, 20, 20, 20), dtype="f4")
    with opened(tmp_path / "shm", precision=1e-3) as cache:
        miss = cache.put(KEY, {"image": image})
        cache.flush()
        hit = cache.get(KEY)
        assert hit["image"].tobytes() == miss["image"].tobytes()
        assert 0 < np.abs(hit["image"] - image).max() <= 1e-3
        assert files(tmp_path / "shm")[0].stat().st_size < image.nbytes * 0.6


def test_the_mapping_of_a_file_that_took_the_name_of_another_is_not_mistaken(tmp_path):
    with opened(tmp_path / "shm") as a, opened(tmp_path / "shm") as b:
        a.put(KEY, {"image": ct(1)})
        a.flush()
        b.get(KEY)
        a._ram.forget(KEY)
        a.put(KEY, {"image": ct(2, 25)})
        a.flush()
        np.testing.assert_array_equal(b.get(KEY)["image"], ct(2, 25))


@pytest.mark.parametrize("memory", ["nonsense", 0, -1, "0", True])
def test_what_is_no_number_of_bytes_is_refused(tmp_path, memory):
    with pytest.raises(CacheConfigError, match="memory="):
        Cache(None, memory=memory, memory_dir=tmp_path)


def test_a_cache_needs_a_place(tmp_path):
    with pytest.raises(CacheConfigError, match="no place"):
        Cache(None)
    with pytest.raises(CacheConfigError, match="memory_dir="):
        Cache(None, memory="auto", memory_dir=tmp_path / "missing")


def test_auto_is_half_of_what_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr(ram, "available_memory_bytes", lambda: 10_000_000)
    tier = ram.RamTier(MemorySettings(None, tmp_path), *[None] * 2)
    tier.join()
    assert tier._directory.budget_bytes == 5_000_000
    tier.close()


def test_no_disk_is_touched_without_a_cache_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(tmp_path / "shm") as cache:
        assert cache.cache_dir is None
        cache.put(KEY, {"image": ct()})
        cache.flush()
        assert list(cache.keys()) == [KEY]
        assert KEY in cache
        assert key(1) not in cache
    assert [p.name for p in tmp_path.iterdir()] == ["shm"]
    assert list((tmp_path / "shm").iterdir()) == []
