"""The cache as a program sees it: a miss and a hit are the same, and whatever breaks, the program goes on."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import zcache.storage.recorder
from tests.strategies import assert_same, random_array, trees
from tests.support import (
    BrokenDisk,
    ct_like,
    files_under,
    gated,
    in_fork,
    key,
    record_of,
    run_script,
    same_bits,
    shard_file,
    staging_left,
)
from zcache.cache import Cache
from zcache.encoding.array_layout import shard_path
from zcache.encoding.narrowing import Precision
from zcache.encoding.shard import crc32c
from zcache.errors import CacheConfigError, CacheWriteError, EntryDamagedError, UnstorableError, ZCacheWarning
from zcache.stats import CacheStats
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads

MISS = object()
EACH_ERROR = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE]
REASONS = {"no_space", "read_only", "permission", "io_error"}


def sample(seed: int = 0) -> dict:
    """An item with arrays that are stored each in its own way, and small things that stay in the tree."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 300, (1, 12, 16, 20)).astype("f4") / 7,
        "label": (rng.random((1, 12, 16, 20)) < 0.1).astype("u1"),
        "noise": rng.standard_normal((6, 5, 40)),
        "affine": np.eye(4),
        "id": (7, "ä", None),
    }


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "c", chunks=(8, 8, 8)) as made:
        yield made
    assert staging_left(tmp_path / "c") == []


def filled(cache_dir: Path, *names: str, **kwargs) -> Cache:
    made = Cache(cache_dir, **kwargs)
    for i, name in enumerate(names or [key(1)]):
        made.put(name, sample(i))
    made.close()
    return made


def messages(heard) -> list[str]:
    assert all(w.category is ZCacheWarning for w in heard)
    return [str(w.message) for w in heard]


# --- Hits, misses and what is in between -----------------------------------------------------------------------------


def test_a_miss_then_a_hit(cache):
    item = sample()
    assert cache.get(key(1)) is None
    assert cache.get(key(1), MISS) is MISS
    assert_same(item, cache.put(key(1), item))
    cache.flush()
    assert_same(item, cache.get(key(1), MISS))
    stats = cache.stats
    assert (stats.misses, stats.hits, stats.stored, stats.skipped) == (2, 1, 1, {})
    assert stats.raw_bytes == item["image"].nbytes + item["noise"].nbytes  # the label has less than 4 KiB
    assert stats.stored_bytes == sum(len(d) for _, d in files_under(cache._store.entry_path(key(1))).values())
    assert list(cache.keys()) == [key(1)]


def test_a_cached_none_is_no_miss(cache):
    cache.put(key(1), None)
    cache.flush()
    assert cache.get(key(1), MISS) is None
    assert cache.stats.hits == 1


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
@given(trees())
def test_case_04_any_item_is_the_same_computed_in_flight_and_read(tmp_path, item):
    with pytest.MonkeyPatch.context() as m, Cache(tmp_path) as cache:
        shutil.rmtree(cache._store.entry_path(key(1)), ignore_errors=True)
        with gated(m) as gate:
            assert_same(item, cache.put(key(1), item))
            assert_same(item, cache.get(key(1), MISS))
            gate.open.set()
            cache.flush()
        assert_same(item, cache.get(key(1), MISS))
        assert cache.stats == CacheStats(
            hits=1, inflight_hits=1, stored=1, raw_bytes=cache.stats.raw_bytes, stored_bytes=cache.stats.stored_bytes,
            wait_s=cache.stats.wait_s,
        )  # fmt: skip


def test_the_first_item_of_a_key_stays(cache):
    cache.put(key(1), sample(1))
    cache.flush()
    cache.put(key(1), sample(2))
    cache.flush()
    assert_same(sample(1), cache.get(key(1)))
    assert (cache.stats.stored, cache.stats.already_stored) == (1, 1)


@pytest.mark.parametrize("name", ["", "x", "A" * 32, "../" + "0" * 29, "0" * 33])
def test_a_malformed_key_is_the_callers_mistake(cache, name):
    for use in (lambda: cache.get(name), lambda: cache.put(name, 1), lambda: cache.get_region(name, "x", ())):
        with pytest.raises(ValueError, match="is not a key"):
            use()


# --- Regions ---------------------------------------------------------------------------------------------------------


def test_a_region_equals_the_slice(cache):
    item = sample()
    cache.put(key(1), item)
    cache.flush()
    whole, part, none = ((0, 12), (0, 16), (0, 20)), ((3, 9), (0, 1), (7, 20)), ((5, 5), (0, 16), (2, 3))
    for region in (((0, 1), *box) for box in (whole, part, none)):
        box = tuple(slice(*r) for r in region)
        for _ in range(2):
            got = cache.get_region(key(1), "image", region)
            assert same_bits(got, np.ascontiguousarray(item["image"][box]))
            got[...] = 0
    assert (cache.stats.hits, cache.stats.misses) == (6, 0)


@pytest.mark.parametrize(
    "region", [(), ((0, 1),) * 3, ((0, 1),) * 5, *(((0, 1), bad, (0, 1), (0, 1)) for bad in [(0, 13), (-1, 2), (3, 2)])]
)
def test_a_region_outside_of_the_array_is_an_error(cache, region):
    cache.put(key(1), sample())
    cache.flush()
    with pytest.raises(IndexError, match="does not lie inside 'image'"):
        cache.get_region(key(1), "image", region)


def test_a_region_of_what_is_not_there_is_none(cache):
    assert cache.get_region(key(1), "image", ((0, 1),) * 4) is None
    assert cache.stats == CacheStats(misses=1)


def test_a_region_of_an_array_that_an_entry_lacks_is_none_and_damage(tmp_path, heard):
    cache = filled(tmp_path)
    assert cache.get_region(key(1), "imaeg", ((0, 1),) * 4) is None
    assert "no array 'imaeg'" in messages(heard)[0]
    assert cache.stats.damaged == 1


def test_case_26_a_region_touches_the_chunks_that_overlap_alone(tmp_path, heard):
    cache = Cache(tmp_path, chunks=(8, 8))
    image = random_array("u2", (3, 64, 64), 0)
    cache.put(key(1), {"image": image})
    cache.flush()
    record = record_of(cache._store, key(1)).arrays["image"]
    shard = shard_file(cache._store, key(1), "image", 3)
    data = bytearray(shard.read_bytes())
    frame = (record.shard_nbytes - 16 * record.grid.n_chunks) // record.grid.n_chunks
    inside = {r.chunk for r in record.grid.reads(((1, 2), (20, 40), (10, 30)))}
    assert len(inside) == 9
    for i in range(record.grid.n_chunks):
        if i not in inside:
            data[i * frame + 20] ^= 0xFF
    shard.write_bytes(data)
    got = cache.get_region(key(1), "image", ((1, 2), (20, 40), (10, 30)))
    assert same_bits(got, np.ascontiguousarray(image[1:2, 20:40, 10:30]))
    assert not heard
    assert cache.get_region(key(1), "image", ((1, 2), (20, 41), (10, 30))) is None
    assert key(1) in messages(heard)[0]
    cache.close()


def test_case_05_a_damaged_region_is_raised_on_request(tmp_path):
    filled(tmp_path)
    cache = Cache(tmp_path, on_error="raise")
    shard_file(cache._store, key(1), "image", 4).write_bytes(b"")
    with pytest.raises(EntryDamagedError):
        cache.get_region(key(1), "image", ((0, 1),) * 4)


# --- Nothing is shared -----------------------------------------------------------------------------------------------


def test_case_08_what_is_changed_while_its_write_waits_is_stored_as_it_was(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    item, expected = sample(), sample()
    with gated(monkeypatch) as gate:
        returned = cache.put(key(1), item)
        assert gate.reached.wait(30)
        in_flight = cache.get(key(1))
        for mine in (item, returned, in_flight):
            for name in ("image", "label", "noise", "affine"):
                mine[name][...] = 99
            mine["extra"] = 1
            mine["id"] = ()
        assert_same(expected, cache.get(key(1)))
        gate.open.set()
        cache.flush()
    assert cache.stats.inflight_hits == 2
    for _ in range(2):
        read = cache.get(key(1))
        assert_same(expected, read)
        read["image"] += 1
        read["affine"][...] = 0
    assert gate.writes == 1
    cache.close()


def test_case_08_views_and_repeated_objects_come_back_apart(cache):
    base = np.arange(20000.0)
    cache.put(key(1), [base, base[::2], base, base[:10]])
    base[:] = 0
    cache.flush()
    a, b, c, d = cache.get(key(1))
    assert same_bits(a, np.arange(20000.0))
    assert same_bits(b, np.arange(0, 20000.0, 2))
    for x in (a, b, c, d):
        assert x.flags.writeable
        assert x.flags.c_contiguous
    a[0] = 7
    assert c[0] == d[0] == 0


# --- What cannot be stored -------------------------------------------------------------------------------------------


def test_an_item_that_cannot_be_stored_is_returned_with_one_warning(tmp_path, heard):
    cache = Cache(tmp_path / "c")
    for i in range(3):
        item = {"image": np.ones(9999), "meta": {"handle": sys.stdout}}
        assert cache.put(key(i), item) is item
    cache.close()
    (message,) = messages(heard)
    assert "['meta']['handle']" in message
    assert "TextIO" in message or "EncodedFile" in message
    assert key(0) in message
    assert cache.stats.skipped == {"unstorable": 3}
    assert not (tmp_path / "c").exists()


def test_an_item_that_cannot_be_stored_is_raised_on_request(tmp_path):
    cache = Cache(tmp_path, on_error="raise")
    with pytest.raises(UnstorableError, match=r"\['x'\]"):
        cache.put(key(1), {"x": object()})
    assert cache.stats.skipped == {"unstorable": 1}


def test_values_that_no_process_could_find_again_are_returned_all_the_same(tmp_path, heard):
    class Local(enum.Enum):
        A = 1

    cache = Cache(tmp_path)
    for i, value in enumerate([Local.A, np.array(["a"], np.dtypes.StringDType())]):
        item = {"x": value}
        assert cache.put(key(i), item) is item
    cache.close()
    assert cache.stats.skipped == {"unstorable": 2}
    assert len(messages(heard)) == 1


def test_keys_of_any_text_make_entries_that_can_be_read(cache):
    names = ["a..b", "..", "/etc/passwd", "C", "c", "zarr.json", "ü", "", "\0"]
    item = {name: ct_like((9, 9, 99), i) for i, name in enumerate(names)}
    cache.put(key(1), item)
    cache.flush()
    assert_same(item, cache.get(key(1), MISS))


def test_too_little_memory_for_a_copy_is_no_reason_to_stop(tmp_path, monkeypatch, heard):
    cache = Cache(tmp_path)
    item = sample()

    def refuse(*_):
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr("zcache.encoding.payload.EncodedItem.snapshot", refuse)
        assert cache.put(key(1), item) is item
    assert cache.stats.skipped == {"memory": 1}
    cache.put(key(1), item)
    cache.flush()
    with monkeypatch.context() as m:
        m.setattr("zcache.storage.reader.Shard.read", refuse)
        assert cache.get(key(1), MISS) is MISS
    assert cache.stats.read_errors == 1
    assert_same(item, cache.get(key(1)))
    first, second = messages(heard)
    assert first.startswith(f"item {key(1)} is not cached (not enough memory for a copy of the item): MemoryError. ")
    assert second.startswith(
        f"the entry {cache._store.entry_path(key(1))} cannot be read and is recomputed: MemoryError. "
    )
    cache.close()


def test_an_error_of_our_own_is_counted_and_told(tmp_path, monkeypatch, heard):
    cache = Cache(tmp_path)

    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(zcache.storage.recorder, "write_entry", broken)
    item = sample()
    assert_same(item, cache.put(key(1), item))
    cache.close()
    assert cache.stats.skipped == {"internal": 1}
    (message,) = messages(heard)
    assert "oops" in message
    assert "report" in message


# --- A disk that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lasting"),
    [(errno.ENOSPC, True), *((error, False) for error in EACH_ERROR)],
    ids=lambda x: errno.errorcode.get(x, x) if type(x) is int else "from-then-on" if x else "once",
)
def test_case_18_a_disk_that_refuses_at_any_step_stops_nothing(tmp_path, monkeypatch, heard, error, lasting):
    item = {"image": ct_like((5, 16, 40))}
    for n in range(1, 100, 1 if error == errno.ENOSPC else 3):
        heard.clear()
        cache = Cache(tmp_path / str(n))
        with monkeypatch.context() as m:
            disk = BrokenDisk(m, error, n, lasting=lasting)
            for i in (1, 2):
                assert_same(item, cache.put(key(i), item))
                cache.flush()
                found = cache.get(key(i), MISS)
                if found is not MISS:
                    assert_same(item, found)
        cache.close()
        stats = cache.stats
        lost = sum(stats.skipped.values())
        assert stats.stored + lost == 2
        assert set(stats.skipped) <= REASONS
        assert lost <= (2 if lasting else 1)
        assert len(messages(heard)) == min(lost, 1)
        if lost:
            assert key(1) in messages(heard)[0] or key(2) in messages(heard)[0]
            assert os.strerror(error) in messages(heard)[0]
        assert staging_left(tmp_path / str(n)) == []
        assert len(list(cache.keys())) == stats.stored
        if not disk.broken:
            break
    assert not disk.broken
    assert n > 15
    expected = {errno.ENOSPC: "no_space", errno.EDQUOT: "no_space", errno.EROFS: "read_only"}
    expected[errno.EACCES] = "permission"
    cache = Cache(tmp_path / "again")
    with monkeypatch.context() as m:
        BrokenDisk(m, error, 1, lasting=True)
        cache.put(key(1), item)
        cache.flush()
    assert cache.stats.skipped == {expected.get(error, "io_error"): 1}


def test_case_18_a_refusal_is_raised_on_request(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "c", on_error="raise")
    BrokenDisk(monkeypatch, errno.ENOSPC, 1, lasting=True)
    cache.put(key(1), sample())
    with pytest.raises(CacheWriteError, match="No space left") as e:
        cache.flush()
    assert key(1) in str(e.value)
    assert "disk or the quota is full" in str(e.value)
    cache.flush()  # told once


def mounting(options: str, folder: Path) -> tuple[str, ...]:
    """What to put before a command so that it sees a file system of its own on a folder; a skip where refused."""
    folder.mkdir()
    command = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} zcache "$0" && exec "$@"', str(folder))
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system takes root and unshare")
    return command


def test_case_18_a_full_file_system(tmp_path):
    mounted = mounting("size=600k", tmp_path / "full")
    printed = run_script(
        """
        import json, sys, warnings
        import numpy as np
        from zcache.cache import Cache
        from pathlib import Path

        rng = np.random.default_rng(0)
        cache = Cache(sys.argv[1] + "/cache")
        items = [{"image": rng.integers(0, 2**16, (40, 40, 40), np.uint16)} for _ in range(12)]
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                for i, item in enumerate(items):
                    found = cache.get(f"{i:032x}")
                    back = cache.put(f"{i:032x}", item) if found is None else found
                    assert (back["image"] == item["image"]).all()
            cache.close()
        stats = cache.stats
        assert 2 <= stats.stored <= 4, stats
        assert stats.skipped == {"no_space": 24 - stats.hits - stats.inflight_hits - stats.stored}, stats
        assert stats.hits + stats.inflight_hits >= stats.stored, stats
        assert len(heard) == 1
        assert "No space left on device" in str(heard[0].message)
        assert len(list(cache.keys())) == stats.stored
        assert list(Path(sys.argv[1], "cache", "staging").iterdir()) == []
        for name in cache.keys():
            assert (cache.get(name)["image"] == items[int(name, 16)]["image"]).all()
        print("went on")
        """,
        tmp_path / "full",
        folder=tmp_path,
        wrap=mounted,
    )
    assert printed == "went on"


def test_case_18_a_read_only_file_system(tmp_path):
    mounted = mounting("ro", tmp_path / "ro")
    printed = run_script(
        """
        import sys, warnings
        import numpy as np
        from zcache.cache import Cache

        cache = Cache(sys.argv[1] + "/cache")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for i in range(3):
                assert (cache.put(f"{i:032x}", {"image": np.arange(9999)})["image"] == np.arange(9999)).all()
            cache.close()
        print(cache.stats.skipped, len(heard), "Read-only file system" in str(heard[0].message))
        """,
        tmp_path / "ro",
        folder=tmp_path,
        wrap=mounted,
    )
    assert printed == "{'read_only': 3} 1 True"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_case_18_a_directory_without_permission(tmp_path, heard):
    (tmp_path / "c").mkdir(mode=0o555)
    with Cache(tmp_path / "c") as cache:
        for i in range(3):
            assert_same(sample(), cache.put(key(i), sample()))
    assert cache.stats.skipped == {"permission": 3}
    assert len(messages(heard)) == 1


def test_case_18_a_directory_that_vanishes_is_made_again(tmp_path):
    cache = filled(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    assert cache.get(key(1), MISS) is MISS
    assert list(cache.keys()) == []
    cache.put(key(1), sample())
    cache.flush()
    assert_same(sample(), cache.get(key(1)))
    cache.close()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.ENXIO, errno.EACCES])
def test_case_17_reads_that_the_file_system_refuses_are_misses(tmp_path, monkeypatch, heard, error):
    filled(tmp_path)
    cache = Cache(tmp_path)
    with monkeypatch.context() as m:

        def refuse(*_):
            raise OSError(error, os.strerror(error))

        m.setattr(os, "pread", refuse)
        for _ in range(2):
            assert cache.get(key(1), MISS) is MISS
    assert cache.stats.misses == 2
    assert cache.stats.read_errors + cache.stats.damaged == 2
    (message,) = messages(heard)
    assert key(1) in message
    assert_same(sample(), cache.get(key(1)))


# --- Damage ----------------------------------------------------------------------------------------------------------

IMAGE_SHARD = f"image/{shard_path(4)}"
NOISE_SHARD = f"noise/{shard_path(3)}"


def truncated(data):
    return data[: len(data) // 2]


def without_its_end(data):
    return data[:-1]


def emptied(_):
    return b""


def zeroed(data):
    return b"\0" * len(data)


def longer(data):
    return data + b"\0"


def swapped_halves(data):
    return data[len(data) // 2 :] + data[: len(data) // 2]


def assert_healed(cache: Cache, heard, what: str = "damaged") -> None:
    """A warning with the key, a miss, recomputed and replaced by the next put, then right to the last bit."""
    before = cache.stats
    heard.clear()
    assert cache.get(key(1), MISS) is MISS
    assert_same(sample(), cache.put(key(1), sample()))
    cache.flush()
    assert_same(sample(), cache.get(key(1), MISS))
    after = cache.stats
    assert after.misses - before.misses == 1
    assert after.stored - before.stored == 1
    assert after.hits - before.hits == 1
    if what:
        assert getattr(after, what) - getattr(before, what) == 1
        if getattr(before, what) == 0:
            (message,) = messages(heard)
            assert key(1) in message
            assert "recomputed" in message
    cache.close()
    assert staging_left(cache.cache_dir) == []


@pytest.mark.parametrize("how", [truncated, without_its_end, emptied, zeroed, longer, swapped_halves])
@pytest.mark.parametrize("file", ["zarr.json", IMAGE_SHARD, NOISE_SHARD])
def test_case_05_a_damaged_file_is_recomputed_and_replaced(tmp_path, heard, file, how):
    cache = filled(tmp_path)
    path = cache._store.entry_path(key(1)) / file
    path.write_bytes(how(path.read_bytes()))
    assert_healed(Cache(tmp_path), heard)


@pytest.mark.parametrize("file", ["zarr.json", IMAGE_SHARD, NOISE_SHARD])
def test_case_05_one_flipped_bit_anywhere_is_recomputed_and_replaced(tmp_path, heard, file):
    cache = filled(tmp_path, chunks=(8, 8, 8))
    data = (cache._store.entry_path(key(1)) / file).read_bytes()
    assert len(data) > 1000
    tail = [len(data) - 1, len(data) - 3, len(data) - 6, len(data) - 9]  # the index and its checksum
    for i in [0, 1, 15, 17, *range(40, len(data), len(data) // 25), *tail]:
        broken = bytearray((cache._store.entry_path(key(1)) / file).read_bytes())
        broken[min(i, len(broken) - 1)] ^= 1 << (i % 8)
        (cache._store.entry_path(key(1)) / file).write_bytes(broken)
        assert_healed(cache, heard)
    assert cache.stats.damaged > 25


def test_case_06_a_deleted_shard_is_no_fill_value(tmp_path, heard):
    cache = filled(tmp_path)
    (cache._store.entry_path(key(1)) / IMAGE_SHARD).unlink()
    assert_healed(Cache(tmp_path), heard)
    shutil.rmtree(cache._store.entry_path(key(1)) / "noise")
    assert_healed(Cache(tmp_path), heard)


def test_case_05_an_entry_without_its_document_is_recomputed_and_replaced(tmp_path, heard):
    cache = filled(tmp_path)
    (cache._store.entry_path(key(1)) / "zarr.json").unlink()
    assert_healed(Cache(tmp_path), heard, what="")
    assert_same(sample(), Cache(tmp_path).get(key(1)))


def test_case_06_a_zeroed_chunk_is_detected_and_a_label_of_zeros_is_valid(tmp_path, heard):
    cache = Cache(tmp_path, chunks=(8, 8, 8))
    item = {"ct": ct_like((1, 24, 24, 24)), "label": np.zeros((1, 24, 24, 24), "u1")}
    item["label"][0, 20, 20, 20] = 1
    cache.put(key(1), item)
    cache.close()
    assert_same(item, cache.get(key(1)))
    assert not cache.get_region(key(1), "label", ((0, 1), (0, 16), (0, 16), (0, 16))).any()
    assert not heard
    shard = cache._store.entry_path(key(1)) / "ct" / shard_path(4)
    data = shard.read_bytes()
    shard.write_bytes(data[:200] + b"\0" * 800 + data[1000:])
    assert cache.get(key(1), MISS) is MISS
    assert cache.stats.damaged == 1
    assert len(messages(heard)) == 1


def replaced_by_file(path):
    path.write_text("not ours")


def replaced_by_link_loop(path):
    path.symlink_to(path)


def replaced_by_empty_folder(path):
    path.mkdir()


def replaced_by_dangling_link(path):
    path.symlink_to(path.parent / "nowhere")


def replaced_by_folder_of_folders(path):
    (path / "zarr.json").mkdir(parents=True)


@pytest.mark.parametrize(
    ("obstacle", "what"),
    [
        (replaced_by_file, "read_errors"),
        (replaced_by_link_loop, "read_errors"),
        (replaced_by_folder_of_folders, "damaged"),
        (replaced_by_empty_folder, ""),
        (replaced_by_dangling_link, ""),
    ],
)
def test_case_05_something_else_under_an_entrys_name_is_replaced(tmp_path, heard, obstacle, what):
    cache = filled(tmp_path)
    shutil.rmtree(cache._store.entry_path(key(1)))
    obstacle(cache._store.entry_path(key(1)))
    assert_healed(Cache(tmp_path), heard, what)


def test_case_05_metadata_of_one_generation_with_a_shard_of_another_is_a_miss(tmp_path, heard):
    cache = Cache(tmp_path)
    for i in (1, 2):
        cache.put(key(i), {"x": random_array("u2", (50, 50), i)})
    cache.close()
    a, b = (cache._store.entry_path(key(i)) / "x" / shard_path(2) for i in (1, 2))
    assert a.stat().st_size == b.stat().st_size  # what does not compress has chunks of the same lengths
    shutil.copyfile(b, a)
    assert cache.get(key(1), MISS) is MISS
    assert cache.stats.damaged == 1
    assert "not the one that the entry was published with" in messages(heard)[0]


def test_case_05_damage_is_raised_on_request(tmp_path):
    filled(tmp_path)
    cache = Cache(tmp_path, on_error="raise")
    (cache._store.entry_path(key(1)) / "zarr.json").write_bytes(b"{}")
    with pytest.raises(EntryDamagedError):
        cache.get(key(1))
    cache.put(key(1), sample())
    cache.flush()
    assert_same(sample(), cache.get(key(1)))
    cache.close()


def test_damage_of_many_entries_is_warned_of_once_and_counted(tmp_path, heard):
    names = [key(i) for i in range(4)]
    filled(tmp_path, *names)
    cache = Cache(tmp_path)
    for name in names:
        (cache._store.entry_path(name) / "zarr.json").write_bytes(b"")
        assert cache.get(name, MISS) is MISS
    assert cache.stats.damaged == 4
    assert len(messages(heard)) == 1


def resealed(document: dict) -> bytes:
    data = json.dumps(document, separators=(",", ":")).encode()
    start = data.index(b'"crc32c":"') + 10
    return data[:start] + b"%08x" % crc32c(data[start + 8 :]) + data[start + 8 :]


def test_case_36_another_format_is_a_miss(tmp_path, heard):
    cache = filled(tmp_path)
    path = cache._store.entry_path(key(1)) / "zarr.json"
    document = json.loads(path.read_bytes())
    assert resealed(document) == path.read_bytes()
    document["attributes"]["zcache"]["format"] = 2
    path.write_bytes(resealed(document))
    assert cache.get(key(1), MISS) is MISS
    (message,) = messages(heard)
    assert "format 2" in message
    heard.clear()
    assert_healed(Cache(tmp_path), heard)


def places(node, path=()):
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in children:
        yield from places(child, (*path, step))


HOSTILE_VALUES = [None, True, -1, 3, 2**62, 10**30, 1.5, "x", [1], {"$enum": ["os", "a", "b"]}]


def test_hostile_documents_are_misses_or_items_and_never_exceptions(tmp_path, heard):
    cache = filled(tmp_path, chunks=(8, 8, 8))
    path = cache._store.entry_path(key(1)) / "zarr.json"
    original = path.read_bytes()
    tried = 0
    for place in list(places(json.loads(original)))[1:]:
        for value in HOSTILE_VALUES:
            document = json.loads(original)
            node = document
            for step in place[:-1]:
                node = node[step]
            node[place[-1]] = value
            try:
                data = resealed(document)
            except ValueError:
                continue  # the checksum's own place is gone
            path.write_bytes(data)
            cache._entries.forget(key(1))
            cache.get(key(1), MISS)
            with contextlib.suppress(IndexError):  # it may lie about the shape
                cache.get_region(key(1), "noise", ((0, 1), (0, 1), (0, 1)))
            tried += 1
    assert tried > 1500
    assert cache.stats.damaged > 1000
    path.write_bytes(original)
    assert_same(sample(), cache.get(key(1)))


# --- Read-only -------------------------------------------------------------------------------------------------------


def test_a_read_only_cache_changes_nothing(tmp_path, heard):
    filled(tmp_path, key(1), key(2))
    store = Store(tmp_path)
    (store.entry_path(key(2)) / "zarr.json").write_bytes(b"")
    before = files_under(tmp_path)
    with Cache(tmp_path, read_only=True) as cache:
        assert_same(sample(), cache.get(key(1)))
        assert cache.get(key(2), MISS) is MISS
        for i in (2, 3):
            assert_same(sample(i), cache.put(key(i), sample(i)))
        cache.flush()
        assert cache.get(key(3), MISS) is MISS
    assert files_under(tmp_path) == before
    assert cache.stats.skipped == {"read_only": 2}
    assert [key(2) in m for m in messages(heard)] == [True]


def test_a_read_only_cache_makes_no_directory(tmp_path):
    with Cache(tmp_path / "c", read_only=True) as cache:
        item = cache.put(key(1), sample())
        assert_same(sample(), item)
        assert cache.get(key(1), MISS) is MISS
    assert not (tmp_path / "c").exists()


# --- Threads, processes, several caches ------------------------------------------------------------------------------


def test_case_11_two_caches_on_one_new_directory(tmp_path):
    with Cache(tmp_path / "new" / "c") as train, Cache(tmp_path / "new" / "c") as validation:
        for i in range(5):
            train.put(key(i), sample(i))
            validation.put(key(i), sample(i))
        train.flush()
        validation.flush()
        for i in range(5):
            assert_same(sample(i), train.get(key(i)))
            assert_same(sample(i), validation.get(key(i)))
        assert train.stats.stored + validation.stats.stored == 5
        assert train.stats.already_stored + validation.stats.already_stored == 5
    assert staging_left(tmp_path / "new" / "c") == []


def _start_at_once(cache_dir, start, results):
    cache = Cache(cache_dir)
    start.wait()
    for i in range(6):
        found = cache.get(key(i), MISS)
        item = cache.put(key(i), sample(i)) if found is MISS else found
        assert_same(sample(i), item)
    cache.close()
    results.put((cache.stats.stored, cache.stats.already_stored, cache.stats.damaged, dict(cache.stats.skipped)))


def test_case_11_many_processes_start_at_once_on_a_directory_that_does_not_exist(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6), context.Queue()
    processes = [context.Process(target=_start_at_once, args=(tmp_path / "a" / "c", start, results)) for _ in range(6)]
    for p in processes:
        p.start()
    found = [results.get(timeout=60) for _ in processes]
    for p in processes:
        p.join()
        assert p.exitcode == 0
    assert sum(stored for stored, *_ in found) == 6
    assert sum(again for _, again, *_ in found) <= 30
    assert all(damaged == 0 and skipped == {} for *_, damaged, skipped in found)
    cache = Cache(tmp_path / "a" / "c")
    assert sorted(cache.keys()) == [key(i) for i in range(6)]
    for i in range(6):
        assert_same(sample(i), cache.get(key(i)))
    assert staging_left(tmp_path / "a" / "c") == []


def test_many_threads_use_one_cache(tmp_path):
    cache = Cache(tmp_path, max_pending_bytes="64KiB")
    trouble = []

    def use(shift):
        try:
            for i in range(12):
                name = key((i + shift) % 12)
                seed = (i + shift) % 12
                found = cache.get(name, MISS)
                assert_same(sample(seed), cache.put(name, sample(seed)) if found is MISS else found)
        except BaseException as e:  # noqa: BLE001
            trouble.append(e)

    threads = [threading.Thread(target=use, args=(3 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    cache.close()
    assert not trouble
    assert cache.stats.stored == 12
    assert staging_left(tmp_path) == []


def test_case_14_a_child_forked_while_the_parent_writes_reads_and_writes_its_own(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    cache.put(key(0), sample(0))
    cache.flush()
    assert_same(sample(0), cache.get(key(0)))
    real = zcache.storage.recorder.write_entry
    with gated(monkeypatch) as gate:
        cache.put(key(1), sample(1))
        assert gate.reached.wait(30)

        def child():
            zcache.storage.recorder.write_entry = real
            assert_same(sample(0), cache.get(key(0)))
            assert cache.get(key(1), MISS) is MISS  # pending in the parent alone
            assert_same(sample(1), cache.put(key(1), sample(1)))
            assert_same(sample(2), cache.put(key(2), sample(2)))
            cache.close()
            assert_same(sample(1), cache.get(key(1)))

        with cache._recorder._lock, cache._store._lock:  # held by a writer thread at the moment of the fork
            in_fork(child)
        gate.open.set()
        cache.close()
    assert_same(sample(2), cache.get(key(2)))
    stats = cache.stats
    assert (stats.stored, stats.already_stored, stats.misses) == (3, 1, 1)  # the child's counts are ours
    assert staging_left(tmp_path) == []


@pytest.mark.parametrize("made", [Cache, Store, lambda _: ReadThreads(2)], ids=["cache", "store", "threads"])
def test_case_14_what_a_child_makes_anew_is_used_by_its_other_threads_only_when_it_is_complete(tmp_path, made):
    """They look at the process id to tell: until that is set, what they would use is their parent's, locks and all."""
    used = made(tmp_path)
    changed = []

    class Noted(type(used)):
        def __setattr__(self, name, value):
            changed.append(name)
            super().__setattr__(name, value)

    used.__class__ = Noted
    used._reset()
    assert changed[-1] == "_pid"
    assert len(set(changed)) == len(changed) > 3


FORKED_IN_AN_IMPORT = """
    import importlib.machinery, os, sys, threading
    import numpy as np
    from zcache.cache import Cache

    class Slow:  # holds the writer thread inside of the module that it imports
        def find_spec(self, name, path=None, target=None):
            if threading.current_thread() is threading.main_thread():
                return None
            names.append(name)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            body = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (reached.set(), go_on.wait(30), body(module))
            return spec

    names, reached, go_on = [], threading.Event(), threading.Event()
    sys.meta_path.insert(0, Slow())
    cache = Cache(sys.argv[1], on_error="raise")
    cache.put("0" * 32, np.arange(9999))
    while not (reached.wait(0.01) or cache.stats.stored):
        pass
    if os.fork() == 0:
        cache.put("1" * 32, np.arange(9999))
        cache.close()
        os._exit(0)
    assert os.wait()[1] == 0
    go_on.set()
    cache.close()
    assert len(list(cache.keys())) == 2
    print(sorted(names))
"""


def test_case_14_a_child_forked_while_the_writer_imports_something_writes_too(tmp_path):
    # numcodecs makes a lock when it first compresses; without one, it compresses all the same.
    expected = "['_multiprocessing', 'multiprocessing.synchronize']"
    assert run_script(FORKED_IN_AN_IMPORT, tmp_path / "c", folder=tmp_path) in (expected, "[]")


def test_case_14_the_parents_troubles_are_not_told_by_its_children(tmp_path, heard):
    cache = Cache(tmp_path)
    cache._troubles.note("damaged", "the parent's own", EntryDamagedError("x"))

    def child():
        heard.clear()
        cache.get(key(1))
        assert not heard

    in_fork(child)
    cache.get(key(1))
    assert len(messages(heard)) == 1


def test_a_cache_is_pickled_with_its_settings_and_without_its_work(tmp_path, monkeypatch):
    cache = Cache(tmp_path, codec="zstd", clevel=3, chunks=[8, 8], precision=0.01, max_pending_bytes="1MiB", writers=1)
    with gated(monkeypatch) as gate:
        cache.put(key(1), sample())
        assert gate.reached.wait(30)
        other = pickle.loads(pickle.dumps(cache))
        assert other.get(key(1), MISS) is MISS
        gate.open.set()
        cache.close()
    assert other.cache_dir == tmp_path
    assert other.precision == Precision.parse(0.01)
    noise = other.get(key(1))["noise"]
    assert 0 < np.abs(noise - sample()["noise"]).max() <= 0.01
    record = record_of(other._store, key(1)).arrays["image"]
    assert (record.codec.cname, record.codec.clevel, record.grid.chunk_shape[-2:]) == ("zstd", 3, (8, 8))
    other.put(key(2), sample(2))
    other.close()
    assert other.stats.stored == 1
    assert cache.stats.stored == 1


def test_waiting_for_the_writers_is_counted(tmp_path, monkeypatch):
    cache = Cache(tmp_path, max_pending_bytes="10KiB")
    with gated(monkeypatch) as gate:
        cache.put(key(1), sample())
        assert gate.reached.wait(30)
        thread = threading.Thread(target=cache.put, args=(key(2), sample()))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        gate.open.set()
        thread.join()
    cache.close()
    assert cache.stats.wait_s >= 0.04
    assert cache.stats.stored == 2


def test_a_closed_cache_may_be_used_again(tmp_path):
    cache = Cache(tmp_path)
    for i in range(3):
        cache.put(key(i), sample(i))
        cache.close()
        assert staging_left(tmp_path) == []
        assert_same(sample(i), cache.get(key(i)))


# --- Settings and messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"codec": "gzip"}, "codec='gzip'"),
        ({"clevel": 10}, "clevel=10"),
        ({"clevel": "5"}, "clevel='5'"),
        ({"chunks": "large"}, "chunks='large'"),
        ({"chunks": (0, 8)}, "chunks=(0, 8)"),
        ({"precision": "float8"}, "precision='float8'"),
        ({"precision": -1.0}, "precision=-1.0"),
        ({"writers": 0}, "writers=0"),
        ({"writers": True}, "writers=True"),
        ({"writers": 1.5}, "writers=1.5"),
        ({"max_pending_bytes": 0}, "0 is not a number of bytes"),
        ({"max_pending_bytes": "much"}, "'much' is not a number of bytes"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(tmp_path, arguments, says):
    with pytest.raises(CacheConfigError) as e:
        Cache(tmp_path / "c", **arguments)
    assert says in str(e.value)
    assert not (tmp_path / "c").exists()


def test_a_file_is_no_cache_directory(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(CacheConfigError, match="is a file"):
        Cache(tmp_path / "f")


def test_the_compressor_and_the_precision_reach_the_disk(tmp_path):
    with Cache(tmp_path, codec="zlib", clevel=1, precision="uint8") as cache:
        cache.put(key(1), sample())
        cache.flush()
        records = record_of(cache._store, key(1)).arrays
    assert {(r.codec.cname, r.codec.clevel) for r in records.values()} == {("zlib", 1)}
    assert records["noise"].dtype == np.uint8
    assert_same(sample()["label"], cache.get(key(1))["label"])


def test_what_is_said_about_an_item_is_kept(tmp_path):
    with Cache(tmp_path) as cache:
        cache.put(key(1), {"a": 1}, {"source": ["/data/x.nii.gz"], "pipeline": ["LoadImaged"]})
        cache.flush()
        about = record_of(cache._store, key(1)).about
    assert about["source"] == ["/data/x.nii.gz"]
    assert about["pipeline"] == ["LoadImaged"]
    assert "created" in about


def test_an_image_that_stays_float_is_hinted_at_once(tmp_path, caplog):
    image = np.cumsum(np.random.default_rng(0).standard_normal((70, 70, 70)), axis=0).astype("f4")
    with caplog.at_level(logging.INFO, "zcache"), Cache(tmp_path) as cache:
        for i in range(3):
            cache.put(key(i), {"image": image + i})
            cache.flush()
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("'image' is kept as float32")
    assert "precision='float16'" in text
    assert "precision='uint8'" in text
    with caplog.at_level(logging.INFO, "zcache"), Cache(tmp_path / "b", precision="float16") as cache:
        cache.put(key(1), {"image": image})
    assert len(caplog.records) == 1


def test_skipping_is_counted_and_told_once(tmp_path, heard):
    cache = Cache(tmp_path)
    for _ in range(2):
        cache.skip("unkeyable", "an item", TypeError("no key"))
    assert cache.stats.skipped == {"unkeyable": 2}
    (message,) = messages(heard)
    assert message.startswith("an item is not cached (no stable key can be made from the item): no key")
    with pytest.raises(CacheWriteError, match="no key"):
        Cache(tmp_path, on_error="raise").skip("unkeyable", "an item", TypeError("no key"))
