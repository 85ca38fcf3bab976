"""Reads stay inside the cache directory, and of plain files: links, devices and pipes in an entry are not followed."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.hostile.forge import Forged, sealed
from tests.hostile.jail import MIB, run
from zcache.cache import Cache
from zcache.encoding.array_layout import shard_path
from zcache.errors import ZCacheWarning
from zcache.storage.store import Store, sweep_staging

KEY, OTHER = f"{1:032x}", f"{2:032x}"
MISS = object()
STUCK_S = 3


def item(seed: int) -> dict[str, np.ndarray]:
    image = np.random.default_rng(seed).integers(0, 999, (1, 16, 16, 16)).astype(np.int16)
    return {"image": image, "label": image // 300 - image.dtype.type(1)}


@pytest.fixture
def entry(tmp_path) -> Path:
    """An entry of a cache, beside a directory that is none of the cache's."""
    fill(tmp_path / "cache", KEY, 1)
    (tmp_path / "secret").mkdir()
    return tmp_path / "cache" / "cache.zarr" / KEY


def fill(cache_dir: Path, key: str, seed: int) -> None:
    with Cache(cache_dir) as cache:
        cache.put(key, item(seed))


def read(cache: Cache) -> object:
    """Read the entry; fail if that takes longer than it should, and let the reader go."""
    found: list[object] = []

    def get() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZCacheWarning)
            found.append(cache.get(KEY, MISS))

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(STUCK_S)
    if thread.is_alive():
        for pipe in (p for p in cache.cache_dir.rglob("*") if stat.S_ISFIFO(p.lstat().st_mode)):
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        thread.join(STUCK_S)
        pytest.fail("reading the entry hung")
    return found[0]


def assert_refused_and_healed(entry: Path) -> None:
    cache = Cache(entry.parents[1])
    assert read(cache) is MISS
    stats = cache.stats
    assert (stats.misses, stats.damaged + stats.read_errors) == (1, 1)
    cache.put(KEY, item(1))
    cache.close()
    found = read(cache)
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in item(1).items()}
    assert not any(p.is_symlink() for p in entry.rglob("*"))


def shard_of(entry: Path) -> Path:
    return entry / "image" / shard_path(4)


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../image", "..", "/etc/passwd", "a/../../b", "a/b", ".", "", "zarr.json", "x\0y"])
def test_no_name_in_an_entry_becomes_a_path(entry, name):
    forged = Forged.of(entry)
    forged.arrays[name] = forged.arrays["image"]
    forged.metadata[name] = forged.metadata["image"]
    forged.document["attributes"]["zcache"]["payload"]["image"]["$ndarray"]["array"] = name
    (entry / "zarr.json").write_bytes(sealed(forged.document))
    assert_refused_and_healed(entry)


def test_a_tree_that_asks_for_an_array_that_the_document_does_not_describe_opens_nothing(entry, tmp_path, monkeypatch):
    shutil.copytree(entry / "image", entry / "hidden")
    forged = Forged.of(entry)
    forged.document["attributes"]["zcache"]["payload"]["image"]["$ndarray"]["array"] = "hidden"
    (entry / "zarr.json").write_bytes(sealed(forged.document))
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: (opened.append(str(path)), real(path, *a, **k))[1])
    assert read(Cache(entry.parents[1])) is MISS
    assert not any("hidden" in path for path in opened)


# --- Links ------------------------------------------------------------------------------------------------------------


def test_a_link_to_a_file_that_is_no_shard_gives_nothing_away(entry, tmp_path):
    secret = tmp_path / "secret" / "password"
    secret.write_bytes(b"hunter2" * 999)
    shard_of(entry).unlink()
    shard_of(entry).symlink_to(secret)
    assert_refused_and_healed(entry)
    assert secret.read_bytes() == b"hunter2" * 999


LABEL = ["labels", "labels/label", "labels/label/0", "labels/label/0/c/0/0/0/0"]


@pytest.mark.parametrize("place", ["zarr.json", "image", "image/c", "image/c/0/0/0/0", *LABEL, ""])
def test_a_link_out_of_the_cache_directory_is_not_followed(entry, tmp_path, place):
    """Everything that the reader needs is behind the link, sound and with right checksums."""
    outside = tmp_path / "secret" / "entry"
    shutil.copytree(entry, outside)
    here = entry / place if place else entry
    shutil.rmtree(here) if here.is_dir() else here.unlink()
    here.symlink_to(outside / place)
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    assert_refused_and_healed(entry)
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


def test_the_cache_directory_itself_may_be_a_link(entry, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    found = read(Cache(tmp_path / "link"))
    assert found["image"].tobytes() == item(1)["image"].tobytes()


# --- Pipes, devices, directories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["zarr.json", "image/c/0/0/0/0"])
def test_a_pipe_in_the_place_of_a_file_does_not_block(entry, place):
    (entry / place).unlink()
    os.mkfifo(entry / place)
    assert_refused_and_healed(entry)


def test_a_device_in_the_place_of_a_shard_is_not_read(entry):
    shard_of(entry).unlink()
    shard_of(entry).symlink_to("/dev/zero")
    assert_refused_and_healed(entry)


def test_a_device_in_the_place_of_a_document_is_not_read(entry):
    (entry / "zarr.json").unlink()
    (entry / "zarr.json").symlink_to("/dev/zero")
    code = """
        import sys
        from zcache.cache import Cache
        cache = Cache(sys.argv[1])
        print(cache.get(sys.argv[2], "a miss"), cache.stats.damaged + cache.stats.read_errors)
    """
    verdict = run(code, entry.parents[1], KEY, memory=700 * MIB, timeout=20)
    assert (verdict.how, verdict.out) == ("ended", "a miss 1")
    assert verdict.peak_bytes < 100 * MIB


@pytest.mark.parametrize("place", ["zarr.json", "image/c/0/0/0/0"])
def test_a_directory_in_the_place_of_a_file_is_a_miss(entry, place):
    (entry / place).unlink()
    (entry / place).mkdir()
    assert_refused_and_healed(entry)


# --- What a writer removes --------------------------------------------------------------------------------------------


def old(path: Path) -> Path:
    os.utime(path, (time.time() - 10 * 24 * 3600,) * 2)
    return path


def test_a_staging_directory_that_is_a_link_is_not_swept(tmp_path):
    """A link from staging to somebody's home must not empty it."""
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter1.tex").write_text("years of work")
    old(home / "thesis")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "staging").symlink_to(home)
    fill(tmp_path / "cache", KEY, 1)
    assert (home / "thesis" / "chapter1.tex").read_text() == "years of work"


def test_directories_that_no_writer_made_are_not_swept(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(b"x")
    old(tmp_path / "photos")
    assert sweep_staging(tmp_path) == 0
    assert (tmp_path / "photos" / "1.png").read_bytes() == b"x"


def test_a_link_in_staging_is_left_alone(tmp_path):
    (tmp_path / "home" / "x").mkdir(parents=True)
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / ("a" * 32)).symlink_to(old(tmp_path / "home"))
    assert sweep_staging(tmp_path / "staging") == 0
    assert (tmp_path / "home" / "x").is_dir()


@pytest.mark.parametrize(
    "owner",
    [
        "[" * 5000,
        '{"host":"x","pid":Infinity,"started":null}',
        '{"host":1,"pid":"x"}',
        "[]",
        "\xff",
        '{"host":"x","pid":-1,"started":"1"}',
    ],
    ids=["deep", "infinite", "text", "list", "bytes", "negative"],
)
def test_a_staging_directory_with_a_made_up_owner_stops_no_writer(tmp_path, owner):
    strange = tmp_path / "cache" / "staging" / ("a" * 32)
    strange.mkdir(parents=True)
    (strange / "owner.json").write_bytes(owner.encode("latin-1"))
    with Cache(tmp_path / "cache") as cache:
        cache.put(KEY, item(1))
        cache.flush()
        assert (cache.stats.stored, cache.stats.skipped) == (1, {})


def test_a_pipe_in_the_place_of_an_owner_does_not_block(tmp_path):
    strange = tmp_path / "staging" / ("a" * 32)
    strange.mkdir(parents=True)
    os.mkfifo(strange / "owner.json")
    thread = threading.Thread(target=sweep_staging, args=(tmp_path / "staging",), daemon=True)
    thread.start()
    thread.join(STUCK_S)
    hung = thread.is_alive()
    if hung:
        os.close(os.open(strange / "owner.json", os.O_RDWR | os.O_NONBLOCK))
        thread.join(STUCK_S)
    assert not hung


def test_a_read_only_cache_neither_sweeps_nor_writes(tmp_path, entry):
    (entry / "zarr.json").write_bytes(b"")
    strange = tmp_path / "cache" / "staging" / "photos"
    strange.mkdir(parents=True)
    old(strange)
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    with Cache(tmp_path / "cache", read_only=True) as cache:
        assert read(cache) is MISS
        cache.put(KEY, item(1))
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert cache.stats.skipped == {"read_only": 1}


@pytest.mark.parametrize(
    "name", ["", "..", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 33, "/" + "a" * 31, "a" * 31 + "\n"]
)
def test_only_a_key_becomes_the_path_of_an_entry(tmp_path, name):
    with pytest.raises(ValueError, match="is not a key"):
        Store(tmp_path).entry_path(name)
