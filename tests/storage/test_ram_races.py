"""The tier in memory at the wrong moment: replaced, filled or closed meanwhile, out of descriptors, forked."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time

import numpy as np
import pytest

from tests.storage.test_ram import KEY, ct, files, key, opened
from tests.stress.board import fork
from zcache.encoding.narrowing import narrow
from zcache.encoding.payload import encode_item
from zcache.errors import ZCacheWarning
from zcache.storage.shm import SharedDirectory


def test_an_item_that_another_process_fills_first_is_not_refused(tmp_path, monkeypatch):
    """Ranks that fill one memory meet all the time: memory is not full then, and filling does not stop."""
    with opened(tmp_path / "shm") as a, opened(tmp_path / "shm") as b:
        original = SharedDirectory.create

        def create(self, name, nbytes):
            with monkeypatch.context() as m:
                m.setattr(SharedDirectory, "create", original)
                b.put(KEY, {"image": ct()})
                b.flush()
            return original(self, name, nbytes)

        with monkeypatch.context() as m:
            m.setattr(SharedDirectory, "create", create)
            a.put(KEY, {"image": ct()})
            a.flush()
        np.testing.assert_array_equal(a.get(KEY)["image"], ct())
        assert (a.stats.memory_refused, a.stats.memory_filled, b.stats.memory_filled) == (0, 0, 1)


def test_a_file_that_is_laid_out_otherwise_and_takes_the_place_of_another_meanwhile_is_read_as_it_is(
    tmp_path, monkeypatch
):
    """Without copies, an item is mapped anew each time, and what was read of the file before may not fit."""
    item = {"first": ct(1), "second": np.random.default_rng(2).random((9, 9, 9))}
    with opened(tmp_path / "shm", copy_cache=False) as a, opened(tmp_path / "shm") as b:
        b.put(KEY, item)
        b.flush()
        a.get(KEY)
        original = SharedDirectory.open

        def open_(self, name, **kwargs):
            b._ram.forget(KEY)
            encoded = encode_item(dict(reversed(item.items())), ())
            narrowed = {leaf.name: narrow(leaf.array) for leaf in encoded.leaves}
            leaves = tuple(type(leaf)(leaf.name, narrowed[leaf.name][0]) for leaf in encoded.leaves)
            b._ram.fill(KEY, type(encoded)(encoded.tree, leaves), {n: how for n, (_, how) in narrowed.items()})
            return original(self, name, **kwargs)

        monkeypatch.setattr(SharedDirectory, "open", open_)
        found = a.get(KEY)
        for name, expected in item.items():
            np.testing.assert_array_equal(found[name], expected)
        assert a.stats.damaged == 0


def test_a_process_without_descriptors_reads_from_below_and_spoils_nothing_for_others(tmp_path, heard):
    with opened(tmp_path / "shm") as a:
        a.put(KEY, {"image": ct()})
        a.flush()
        (file,) = files(tmp_path / "shm")
        before = file.stat().st_ino
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), limits[1]))  # none is left
        try:
            assert a.get(KEY, None) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        np.testing.assert_array_equal(a.get(KEY)["image"], ct())
        assert (a.stats.damaged, a.stats.read_errors, a.stats.misses, a.stats.memory_hits) == (0, 1, 1, 1)
        assert file.stat().st_ino == before
    assert [w.category for w in heard] == [ZCacheWarning]
    assert os.strerror(errno.EMFILE) in str(heard[0].message)


def test_an_item_on_its_way_is_never_said_to_be_missing(tmp_path, monkeypatch):
    with opened(tmp_path / "shm") as a:
        original = a._ram.has

        def has(name):
            found = original(name)
            a.flush()  # it gets there between two looks
            return found

        monkeypatch.setattr(a._ram, "has", has)
        a.put(KEY, {"image": ct()})
        assert KEY in a


def test_a_forked_child_may_begin_with_any_call(tmp_path):
    calls = [
        lambda a: list(a.keys()) == [KEY],
        lambda a: KEY in a,
        lambda a: np.array_equal(a.get(KEY)["image"], ct()),
        lambda a: a.close() is None,
        lambda a: a.get_region(KEY, "image", ((0, 1),) * 4).shape == (1, 1, 1, 1),
        lambda a: a.put(key(1), {"image": ct(1)}) is not None,
    ]
    with opened(tmp_path / "shm") as a:
        a.put(KEY, {"image": ct()})
        a.flush()
        for call in calls:
            pid = fork()
            if pid == 0:
                os._exit(0 if call(a) else 1)
            assert os.waitpid(pid, 0)[1] == 0
        np.testing.assert_array_equal(a.get(KEY)["image"], ct())
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.filterwarnings("ignore::zcache.ZCacheWarning")
def test_threads_read_while_another_closes(tmp_path):
    """What is closed under a reader is at worst computed anew, never wrong and never an exception."""
    stop = time.monotonic() + 1
    failures = []
    with opened(tmp_path / "shm", tmp_path / "disk") as a:
        for i in range(4):
            a.put(key(i), {"image": ct(i)})
        a.flush()
        expected = [ct(i) for i in range(4)]

        def read():
            try:
                i = 0
                while time.monotonic() < stop:
                    found = a.get(key(i % 4), None)
                    assert found is None or np.array_equal(found["image"], expected[i % 4])
                    i += 1
            except BaseException as e:  # noqa: BLE001
                failures.append(e)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        while time.monotonic() < stop:
            a.close()
        for thread in threads:
            thread.join()
        assert failures == []
    assert list((tmp_path / "shm").iterdir()) == []
