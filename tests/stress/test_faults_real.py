"""Faults of real systems: full, read-only and vanishing directories, too few descriptors, no permission."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import run_script

# `item(i)` is what belongs to key i.
PREAMBLE = """
import json, os, shutil, sys, warnings
from pathlib import Path
import numpy as np
from zcache.cache import Cache

folder = Path(sys.argv[1])

def item(i):
    return np.random.default_rng(i).integers(0, 2**16, 5000, np.uint16)

def pass_over(cache, n, order=None):
    for i in range(n) if order is None else order:
        found = cache.get(f"{i:032x}")
        back = cache.put(f"{i:032x}", item(i)) if found is None else found
        assert back.dtype == np.uint16 and (back == item(i)).all()
    cache.flush()

def fresh_reads(n):
    with Cache(folder / "cache") as fresh:
        found = [i for i in range(n) if fresh.get(f"{i:032x}") is not None]
        assert all((fresh.get(f"{i:032x}") == item(i)).all() for i in found)
        assert (fresh.stats.damaged, fresh.stats.read_errors) == (0, 0)
        return len(found)

def told(cache):
    return dict(cache.stats.skipped), [str(w.message) for w in heard]

heard = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
"""


def script(code: str, folder: Path, tmp_path: Path, wrap: tuple[str, ...] = ()) -> str:
    return run_script(PREAMBLE + code, folder, folder=tmp_path, wrap=wrap)


def mounted(script_: str, folder: Path) -> tuple[str, ...]:
    """What to put before a command so that it sees file systems of its own; a skip where these are refused."""
    folder.mkdir(exist_ok=True)
    command = ("unshare", "-m", "sh", "-c", f'{script_} && exec "$@"', str(folder))
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system takes root and unshare")
    return command


@pytest.mark.parametrize("durability", ["rename", "fsync"])
def test_case_18_a_full_tmpfs_that_gets_room_again(tmp_path, durability):
    code = f"""
cache = Cache(folder / "cache", durability={durability!r})
ballast = folder / "ballast"
ballast.write_bytes(bytes(300_000))
pass_over(cache, 40)
skipped, said = told(cache)
assert skipped == {{"no_space": 40 - cache.stats.stored}} and 0 < cache.stats.stored < 40, cache.stats
assert len(said) == 1 and "No space left on device" in said[0], said
assert fresh_reads(40) == cache.stats.stored
ballast.unlink()
pass_over(cache, 40)
assert cache.stats.stored > 40 - skipped["no_space"]
cache.close()
assert list((folder / "cache" / "staging").iterdir()) == []
print(fresh_reads(40) == cache.stats.stored, len(heard))
"""
    wrap = mounted('mount -t tmpfs -o size=800k zcache "$0"', tmp_path / "full")
    assert script(code, tmp_path / "full", tmp_path, wrap) == "True 1"


def test_case_18_no_more_files_though_there_is_room(tmp_path):
    code = """
cache = Cache(folder / "cache")
pass_over(cache, 30)
skipped, said = told(cache)
assert skipped == {"no_space": 30 - cache.stats.stored} and 0 < cache.stats.stored < 30, cache.stats
cache.close()
assert list((folder / "cache" / "staging").iterdir()) == []
print(fresh_reads(30) == cache.stats.stored, len(heard))
"""
    wrap = mounted('mount -t tmpfs -o size=9m,nr_inodes=80 zcache "$0"', tmp_path / "inodes")
    assert script(code, tmp_path / "inodes", tmp_path, wrap) == "True 1"


def test_case_18_a_read_only_bind_mount_is_read_and_not_written(tmp_path):
    folder = tmp_path / "ro"
    folder.mkdir()
    wrap = mounted('mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"', folder)
    assert script("pass_over(Cache(folder / 'cache'), 5); print(fresh_reads(5))", folder, tmp_path) == "5"
    code = """
cache = Cache(folder / "cache")
pass_over(cache, 8)
pass_over(cache, 8)
cache.close()
skipped, said = told(cache)
assert cache.stats.hits == 10 and skipped == {"read_only": 6}, cache.stats
print(len(said), "Read-only file system" in said[0], fresh_reads(8))
"""
    assert script(code, folder, tmp_path, wrap) == "1 True 5"


def test_case_20_256_descriptors_are_enough_for_5000_entries(tmp_path):
    code = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
N = 5000
items = [np.random.default_rng(i).integers(0, 256, 4200, np.uint8) for i in range(100)]
item = lambda i: items[i % 100]

def pass_over(cache, order):
    for i in order:
        found = cache.get(f"{i:032x}")
        back = cache.put(f"{i:032x}", item(i)) if found is None else found
        assert (back == item(i)).all()

with Cache(folder / "cache", max_pending_bytes="64MiB") as cache:
    pass_over(cache, range(N))
    cache.flush()
    most = 0
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(N).tolist()
        pass_over(cache, order)
        most = max(most, len(os.listdir("/proc/self/fd")))
assert (cache.stats.stored, cache.stats.hits + cache.stats.inflight_hits) == (N, 2 * N), cache.stats
assert (cache.stats.read_errors, cache.stats.damaged, cache.stats.skipped) == (0, 0, {}), cache.stats
print(len(heard), most < 128)
"""
    memory = Path("/dev/shm")
    folder = tmp_path
    if memory.is_dir() and shutil.disk_usage(memory).free > 2**30:
        folder = memory / f"zcache-descriptors-{os.getpid()}"
        folder.mkdir()
    try:
        assert script(code, folder, tmp_path) == "0 True"
    finally:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        if folder != tmp_path:
            folder.rmdir()


def test_case_20_no_descriptor_left_at_all_is_a_miss_and_a_skip(tmp_path):
    code = """
import resource

cache = Cache(folder / "cache")
pass_over(cache, 2)
cache.get("0" * 32)
low = Cache(folder / "cache")
assert low.stats.hits == 0
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
assert low.get("0" * 32) is None
assert (low.put("f" * 32, item(7)) == item(7)).all()
low.flush()
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
assert (low.stats.read_errors, low.stats.skipped) == (1, {"io_error": 1}), low.stats
assert (low.get("0" * 32) == item(0)).all()
low.put("f" * 32, item(7))
low.close()
cache.close()
print(low.stats.stored, len(heard), all("Too many open files" in str(w.message) for w in heard))
"""
    assert script(code, tmp_path, tmp_path) == "1 2 True"


def test_case_18_the_directory_vanishes_while_it_is_in_use(tmp_path):
    code = """
cache = Cache(folder / "cache")
for n in range(4):
    pass_over(cache, 6)
    if n % 2:
        shutil.rmtree(folder / "cache")
    else:
        os.rename(folder / "cache", folder / f"away{n}")
assert cache.stats.stored == 24 and not cache.stats.skipped, cache.stats
for i in range(200):  # in the middle of writes
    cache.put(f"{i:032x}", item(i))
    if i % 20 == 10:
        shutil.rmtree(folder / "cache", ignore_errors=True)
cache.flush()
assert set(cache.stats.skipped) <= {"io_error"} and len(heard) <= 1
shutil.rmtree(folder / "cache", ignore_errors=True)
before = cache.stats
pass_over(cache, 6)
pass_over(cache, 6)
cache.close()
assert cache.stats.stored - before.stored == 6 and cache.stats.skipped == before.skipped, cache.stats
assert list((folder / "cache" / "staging").iterdir()) == []
print(fresh_reads(6))
"""
    assert script(code, tmp_path, tmp_path) == "6"


def test_case_18_the_directory_becomes_unwritable(tmp_path):
    code = """
with Cache(folder / "before") as cache:  # what is imported on first use need not be readable by others
    pass_over(cache, 1)
    pass_over(cache, 1)
os.chmod(folder, 0o777)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
cache = Cache(folder / "cache")
pass_over(cache, 3)
for name in ("cache.zarr", "staging"):
    os.chmod(folder / "cache" / name, 0o555)
for path in (folder / "cache" / "staging").iterdir():
    os.chmod(path, 0o555)
pass_over(cache, 6)
skipped, said = told(cache)
assert skipped == {"permission": 3} and cache.stats.hits == 3, cache.stats
assert len(said) == 1 and "Permission denied" in said[0], said
assert fresh_reads(6) == 3
os.chmod(folder / "cache" / "cache.zarr" / f"{0:032x}", 0)  # one entry that may not be read either
unreadable = Cache(folder / "cache")
pass_over(unreadable, 6)
assert (unreadable.stats.hits, unreadable.stats.read_errors, unreadable.stats.damaged) == (2, 1, 0), unreadable.stats
assert unreadable.stats.skipped == {"permission": 4}
os.chmod(folder / "cache" / "cache.zarr" / f"{0:032x}", 0o755)
for path in [*(folder / "cache").iterdir(), *(folder / "cache" / "staging").iterdir()]:
    os.chmod(path, 0o755)
pass_over(cache, 6)
cache.close()
unreadable.close()
assert list((folder / "cache" / "staging").iterdir()) == []
print(fresh_reads(6))
"""
    folder = tmp_path / "shared"
    folder.mkdir()
    for above in [folder, *folder.parents]:  # another user has to get there
        if above.stat().st_uid == os.geteuid() and str(above).startswith(str(tmp_path.parents[2])):
            above.chmod(above.stat().st_mode | 0o755)
    assert script(code, folder, tmp_path) == "6"
