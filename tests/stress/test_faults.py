"""Every system call of a fill and of a read, made to fail in every way: training goes on, and the cache stays right."""

from __future__ import annotations

import ast
import errno
import shutil
from pathlib import Path

import pytest

import zcache.storage
from tests.strategies import assert_same
from tests.stress.faults import ERRORS, Fault, faults_of, open_files, system_calls
from tests.stress.faults_fill import (
    ITEMS,
    Fill,
    Healing,
    Indexed,
    IndexedLater,
    Later,
    NextProcess,
    assert_absent_or_whole,
    assert_closed,
    assert_works,
    calls_of,
    heard,
    new_cache,
    trial,
)
from tests.stress.faults_read import (
    READS,
    calls_of_dataset,
    calls_of_read,
    dataset,
    dataset_trial,
    filled,
    patches,
    read_trial,
)
from tests.support import key
from zcache.storage import files

FILLS = [Fill, NextProcess, Later, Healing, Indexed, IndexedLater]
# What an entry cannot do without. A lost answer to a rename looks like another process's work; see Store.publish.
NEEDED = {"write": set(), "fsync": set(), "rename": {errno.ENOENT, errno.ESTALE, errno.ENOTEMPTY, errno.EEXIST}}


@pytest.fixture
def small_buffer(monkeypatch):
    """Each chunk is written by a call of its own."""
    monkeypatch.setattr(files, "_BUFFER_BYTES", 1)


def added_by_fsync(names: list[str], n: int) -> bool:
    """Whether a call is made for the sake of durability: a sync, or the opening or closing of what is synced."""
    return "fsync" in names[max(n - 2, 0) : n + 1]


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize(
    ("kind", "durability"),
    [*((kind, "rename") for kind in FILLS), *((kind, "fsync") for kind in (Fill, Healing, Indexed, IndexedLater))],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_case_18_a_fill_survives_a_fault_of_any_call(folder, monkeypatch, tally, kind, durability):
    names = calls_of(kind, folder / "c", durability=durability)
    assert ("fsync" in names) == (durability == "fsync")
    for fault in faults_of(names):
        if durability == "fsync" and not added_by_fsync(names, fault.n):
            continue  # the same call at the same place as without
        try:
            lost = trial(kind, folder / "t", fault, monkeypatch, durability=durability)
        except BaseException as e:
            e.add_note(f"{fault}, {names[fault.n - 1]}")
            raise
        name = names[fault.n - 1]
        if fault.error and not fault.late and name in NEEDED and fault.error not in NEEDED[name]:
            assert lost, f"{fault}, {name}: not counted"
        tally["faults of a fill"] += 1


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("kind", [Fill, Healing, IndexedLater], ids=lambda kind: kind.__name__)
def test_case_18_a_fault_of_a_fill_is_raised_on_request(folder, monkeypatch, tally, kind):
    names = calls_of(kind, folder / "c", durability="fsync")
    for fault in faults_of(names, (errno.ENOSPC,)):
        if not fault.lasting:
            trial(kind, folder / "t", fault, monkeypatch, durability="fsync", on_error="raise")
            tally["faults of a fill, raised"] += 1


def test_case_18_a_fault_while_a_cache_is_closed_does_no_harm(folder, tally):
    def closing(fault=None):
        with heard() as said:
            cache = new_cache(folder / "t")
            cache.put(key(0), ITEMS[0])
            cache.flush()
            with system_calls(fault) as calls:
                cache.close()
            assert_works(cache, 2)
            cache.close()
            assert_absent_or_whole(folder / "t", 0)
        assert said == []
        assert_closed(folder)
        shutil.rmtree(folder / "t")
        return calls.names

    names = closing()
    assert {"unlink", "rmdir"} <= set(names)
    for fault in faults_of(names):
        closing(fault)
        tally["faults of a closing"] += 1


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_case_17_a_read_survives_a_fault_of_any_call(folder, tally, read, warm):
    filled(folder)
    names = calls_of_read(read, folder, warm=warm)
    assert "pread" in names
    for how, errors in (({}, ERRORS), ({"on_error": "raise"}, (errno.EIO, errno.ENOENT))):
        for fault in faults_of(names, errors):
            try:
                read_trial(read, folder, fault, warm=warm, **how)
            except BaseException as e:
                e.add_note(f"{fault}, {names[fault.n - 1]}")
                raise
            tally["faults of a read"] += 1


@pytest.mark.parametrize("is_filled", [False, True], ids=["fill", "read"])
def test_case_18_a_data_set_with_a_label_guided_crop_survives_a_fault_of_any_call(folder, tally, is_filled):
    expected = patches(dataset(None))
    source = folder / "source"
    if is_filled:
        with dataset(source) as ds:
            assert_same(expected, patches(ds))
    target = folder / "t"

    def prepared():
        if is_filled:
            shutil.copytree(source, target)
        return target

    names = calls_of_dataset(prepared())
    shutil.rmtree(target)
    for fault in faults_of(names, (errno.EIO,)):  # others make no difference above the cache
        try:
            dataset_trial(expected, prepared(), fault)
        except BaseException as e:
            e.add_note(f"{fault}, {names[fault.n - 1]}")
            raise
        shutil.rmtree(target)
        tally["faults of a data set"] += 1


def test_files_that_stay_open_would_be_noticed(folder):
    with (folder / "x").open("w"):
        assert open_files(folder) == 1
    assert open_files(folder) == 0


def test_every_call_is_followed(folder):
    """The doubles see what strace would: a removal call by call, a directory name by name, the n-th call refused."""
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "c").write_text("")
    with system_calls() as calls:
        files.remove_tree(folder / "a")
    assert not (folder / "a").exists()
    assert {"scandir", "readdir", "is_dir", "open", "fstat", "unlink", "rmdir", "close"} <= set(calls.names)
    with system_calls(Fault(1, error=errno.EIO)) as calls:
        with pytest.raises(OSError, match="Input/output"):
            files.make_directory(folder / "x")
        files.make_directory(folder / "x")
    assert calls.struck == ["mkdir"]


# --- The seam is complete --------------------------------------------------------------------------------------------

# Not calls on a store's files: process ids, CPUs, the type of a path, and what /proc tells of processes.
_HARMLESS = {"os.getpid", "os.kill", "os.cpu_count", "os.sched_getaffinity", "os.PathLike", "os.fspath", "os.path"}
_OF_PROC = {"os.readlink", "Path.read_bytes", "Path.read_text"}
_OF_PATHS = {  # methods of pathlib that ask the system; names that other things bear too are told apart by `Path`
    *("absolute", "chmod", "cwd", "exists", "expanduser", "glob", "group", "hardlink_to", "home", "is_block_device"),
    *("is_char_device", "is_dir", "is_fifo", "is_file", "is_junction", "is_mount", "is_socket", "is_symlink"),
    *("iterdir", "lchmod", "link_to", "lstat", "mkdir", "owner", "read_bytes", "read_text", "readlink", "resolve"),
    *("rglob", "rmdir", "samefile", "stat", "symlink_to", "touch", "unlink", "walk", "write_bytes", "write_text"),
}
_MODULES = {"shutil", "io", "mmap", "tempfile", "glob", "fcntl", "ctypes", "subprocess", "sqlite3", "zipfile", "posix"}


def bypasses(source: str) -> list[str]:
    """Name the ways in which a module of storage/ reaches files otherwise than through `files`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _MODULES | {"os"}:
            found.append(f"from {node.module} import")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append("open()")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if f"os.{node.attr}" not in _HARMLESS:
                found.append(f"os.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in _OF_PATHS and ast.unparse(node.value) != "files":
            found.append(f"Path.{node.attr}")
    return found


def paths_in_calls(source: str, names: set[str]) -> list[str]:
    """Return how each literal path begins that is opened by one of the calls named."""
    starts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            target = node.args[0] if node.func.attr == "readlink" else node.func.value.args[0]  # Path("...").read_text
            text = target.values[0] if isinstance(target, ast.JoinedStr) else target
            starts.append(text.value if isinstance(text, ast.Constant) else ast.dump(target))
    return starts


MODULES = sorted(Path(zcache.storage.__file__).parent.glob("*.py"))


# Files in memory have a seam of their own: test_faults_memory.py. `room` and `ram` ask for numbers.
MEMORY = {"ledger.py", "membership.py", "ram.py", "room.py", "shm.py"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.name not in MEMORY | {"files.py"}], ids=lambda m: m.name)
def test_no_module_of_storage_reaches_a_file_past_the_seam(module):
    source = module.read_text()
    found = bypasses(source)
    if module.name == "store.py":
        paths = paths_in_calls(source, {name.partition(".")[2] for name in _OF_PROC})
        assert set(found) <= _OF_PROC
        assert len(paths) == len(found)
        assert all(path.startswith("/proc/") for path in paths), paths
    else:
        assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import shutil",
        "from os import open",
        "from tempfile import mkdtemp",
        "f = open('x')",
        "os.rename(a, b)",
        "os.scandir",
        "path.read_bytes()",
        "Path(x).unlink(missing_ok=True)",
        "self.root.iterdir()",
    ],
)
def test_a_way_past_the_seam_is_found(line):
    assert len(bypasses(line)) == 1
