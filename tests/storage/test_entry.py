"""Entries that a process keeps open: bounded, forgotten when they were replaced, closed when nobody reads them."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from zcache.cache import Cache
from zcache.storage import entry as entry_module


def key(i):
    return f"{i:032x}"


def image(i=0, n=20):
    return np.random.default_rng(i).random((n, n, n), dtype="f4")


def open_files(path):
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(fd.readlink())
    return sum(name.is_relative_to(path) for name in found)


def filled(path, n=1, **kwargs):
    with Cache(path, **kwargs) as cache:
        for i in range(n):
            cache.put(key(i), {"image": image(i), "mask": image(i + 100)})
    return Cache(path, **kwargs)


def test_case_20_few_files_stay_open_however_many_entries_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(entry_module, "_MAX_SHARDS", 4)
    cache = filled(tmp_path, 10)
    for _ in range(2):
        for i in range(10):
            np.testing.assert_array_equal(cache.get(key(i))["image"], image(i))
    assert 0 < open_files(tmp_path) <= 4
    cache.close()
    assert open_files(tmp_path) == 0


def test_a_kept_entry_is_read_without_opening_anything(tmp_path, monkeypatch):
    cache = filled(tmp_path)
    cache.get(key(0))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    np.testing.assert_array_equal(cache.get(key(0))["mask"], image(100))


def test_an_entry_that_another_process_replaced_is_opened_anew_and_is_no_damage(tmp_path):
    cache = filled(tmp_path)
    np.testing.assert_array_equal(cache.get_region(key(0), "image", ((0, 9),) * 3), image(0)[:9, :9, :9])
    other = Cache(tmp_path)
    other._recorder.mark_damaged(key(0))
    other.put(key(0), {"image": image(7), "mask": image(8)})
    other.close()
    # The document kept is the old one, the mask's file was not open yet: the new one does not fit.
    np.testing.assert_array_equal(cache.get(key(0))["mask"], image(8))
    np.testing.assert_array_equal(cache.get(key(0))["image"], image(7))
    assert cache.stats.damaged == 0


def test_an_entry_that_was_removed_is_a_plain_miss_once_it_is_forgotten(tmp_path):
    cache = filled(tmp_path)
    cache.get_region(key(0), "image", ((0, 9),) * 3)
    (tmp_path / "cache.zarr" / key(0)).rename(tmp_path / "away")
    assert cache.get(key(0), None) is None
    assert (cache.stats.misses, cache.stats.damaged, cache.stats.read_errors) == (1, 0, 0)


def test_threads_read_while_files_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(entry_module, "_MAX_SHARDS", 2)
    cache = filled(tmp_path, 6)
    wrong = []

    def read(start):
        for i in range(60):
            n = (start + i) % 6
            if not np.array_equal(cache.get(key(n))["image"], image(n)):
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert cache.stats.hits == 240


def test_boxes_of_one_array_equal_reads_one_by_one(tmp_path):
    cache = filled(tmp_path, chunks=(8, 8, 8))
    regions = [((0, 5), (3, 20), (7, 8)), ((2, 19), (0, 20), (5, 18)), ((4, 4), (0, 1), (0, 1))]
    boxes = cache.using(key(0), lambda entry: entry.read_boxes("image", regions), [])
    for box, region in zip(boxes, regions, strict=True):
        assert box.flags.c_contiguous
        np.testing.assert_array_equal(box, image(0)[tuple(slice(*r) for r in region)])
