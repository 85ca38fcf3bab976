"""Publishing by one rename, and what is left behind: nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import (
    REPOSITORY,
    ct_like,
    files_under,
    in_fork,
    key,
    read,
    run_script,
    same_bits,
    staging_left,
    write,
)
from zcache.errors import CacheConfigError
from zcache.storage import store as st
from zcache.storage.store import Store, sweep_staging


def build(store: Store, text: str, name: str, *, replace: bool = False) -> bool:
    with store.staged() as staged:
        (staged / "zarr.json").write_text(text)
        return store.publish(staged, name, replace=replace)


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "c")
    yield made
    made.close()
    assert staging_left(tmp_path / "c") == []


def test_nothing_is_made_before_the_first_entry(tmp_path):
    store = Store(tmp_path / "a" / "b")
    assert list(store.keys()) == []
    with pytest.raises(FileNotFoundError):
        store.read_document(key(1))
    store.close()
    assert not (tmp_path / "a").exists()


def test_the_first_one_stays(store):
    assert build(store, "first", key(1))
    assert not build(store, "second", key(1))
    assert store.read_document(key(1)) == b"first"
    assert list(store.keys()) == [key(1)]


def test_one_is_replaced_on_request(store):
    for text in ("first", "second", "third"):
        assert build(store, text, key(1), replace=True)
        assert store.read_document(key(1)) == text.encode()


def test_case_11_many_threads_publish_one_key_and_one_wins(store):
    start = threading.Barrier(8)
    won = []

    def publish(i):
        start.wait()
        won.append((build(store, str(i), key(1)), i))

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    (winner,) = [i for ok, i in won if ok]
    assert len(won) == 8
    assert store.read_document(key(1)) == str(winner).encode()


def _publish_all(store, start, won):
    start.wait()
    for i in range(20):
        won.put((i, build(store, str(os.getpid()), key(i)), os.getpid()))
    store.close()


def test_case_11_many_processes_publish_the_same_keys_in_a_new_directory_and_one_wins_each(tmp_path):
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(4), context.Queue()
    store = Store(tmp_path / "new" / "cache")
    processes = [context.Process(target=_publish_all, args=(store, start, won)) for _ in range(4)]
    for p in processes:
        p.start()
    results = [won.get(timeout=60) for _ in range(80)]
    for p in processes:
        p.join()
        assert p.exitcode == 0
    for i in range(20):
        (winner,) = [pid for n, ok, pid in results if ok and n == i]
        assert store.read_document(key(i)) == str(winner).encode()
    assert sorted(store.keys()) == [key(i) for i in range(20)]
    assert staging_left(store.cache_dir) == []


def test_processes_that_replace_the_same_entry_all_succeed_and_it_is_never_torn(tmp_path):
    store = Store(tmp_path)
    build(store, "0" * 999, key(1))
    stop = threading.Event()
    seen, trouble, published = set(), [], []

    def watch():
        while not stop.is_set():
            try:
                seen.add(store.read_document(key(1)))
            except FileNotFoundError:
                pass  # between the two renames of a replacement
            except OSError as e:
                trouble.append(e)

    def replace(letter):
        mine = Store(tmp_path)
        published.extend(build(mine, letter * 999, key(1), replace=True) for _ in range(30))
        mine.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=replace, args=(c,)) for c in "ab"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stop.set()
    watcher.join()
    store.close()
    assert not trouble
    assert seen <= {c * 999 for c in (b"0", b"a", b"b")}
    assert len(published) == 60
    assert store.read_document(key(1)) in (b"a" * 999, b"b" * 999)
    assert staging_left(tmp_path) == []


def foreign_file(path):
    path.write_text("not ours")


def foreign_link(path):
    path.symlink_to(path.parent / "nowhere")


def link_loop(path):
    path.symlink_to(path)


def empty_folder(path):
    path.mkdir()


def folder_without_document(path):
    (path / "image" / "c").mkdir(parents=True)
    (path / "image" / "c" / "0").write_bytes(b"1234")


OBSTACLES = [foreign_file, foreign_link, link_loop, empty_folder, folder_without_document]


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_entry_but_bears_the_name_of_one_gives_way(store, obstacle, replace):
    build(store, "other", key(2))
    obstacle(store.entry_path(key(1)))
    assert build(store, "mine", key(1), replace=replace)
    assert store.read_document(key(1)) == b"mine"
    assert store.read_document(key(2)) == b"other"


def test_a_link_that_gives_way_leaves_what_it_points_to(store, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep me")
    build(store, "other", key(2))
    store.entry_path(key(1)).symlink_to(precious)
    assert build(store, "mine", key(1), replace=True)
    assert (precious / "data").read_text() == "keep me"


def test_a_rename_refused_for_another_reason_is_raised(store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EACCES, "no")

    with store.staged() as staged:
        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(PermissionError):
            store.publish(staged, key(1))


def test_a_name_that_another_process_takes_meanwhile_is_left_to_it(store, monkeypatch):
    build(store, "there", key(1))

    def refuse(*_):
        raise OSError(errno.ENOTEMPTY, "taken")

    with store.staged() as staged:
        (staged / "zarr.json").write_text("x")
        monkeypatch.setattr(store, "_discard", lambda _: None)
        monkeypatch.setattr(os, "rename", refuse)
        assert not store.publish(staged, key(1), replace=True)


def test_a_staged_folder_is_removed_whatever_happens(store):
    def fail():
        with store.staged() as staged:
            places.append(staged)
            (staged / "image").mkdir()
            (staged / "image" / "data").write_bytes(b"1")
            raise RuntimeError

    places = []
    with pytest.raises(RuntimeError):
        fail()
    (staged,) = places
    assert not staged.exists()
    with store.staged() as again:
        assert again != staged
    assert list(store.keys()) == []


def test_closing_spares_what_another_thread_is_building(store):
    with store.staged() as staged:
        store.close()
        (staged / "zarr.json").write_text("x")
        assert store.publish(staged, key(1))
    store.close()
    assert staging_left(store.cache_dir) == []
    assert build(store, "y", key(2))  # and it works again afterwards


def test_a_staging_folder_that_vanished_is_made_anew(store):
    build(store, "x", key(1))
    shutil.rmtree(store.cache_dir / "staging")
    assert build(store, "y", key(2))
    shutil.rmtree(store.cache_dir)
    assert build(store, "z", key(3))
    assert list(store.keys()) == [key(3)]


def stage(parent: Path, name: str, owner: object, age_s: float = 0.0) -> Path:
    folder = parent / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()  # as a writer names its own
    (folder / "1" / "image").mkdir(parents=True)
    if owner is not None:
        (folder / "owner.json").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    when = time.time() - age_s
    os.utime(folder, (when, when))
    return folder


@pytest.fixture
def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_case_17_staging_of_dead_processes_is_swept_and_of_living_ones_never(tmp_path, dead_pid):
    me = st._this_process()
    assert me["pid"] == os.getpid()
    assert me["host"].startswith(socket.gethostname())
    month = 30 * 86400
    gone = [
        stage(tmp_path, "dead", {**me, "pid": dead_pid}),
        stage(tmp_path, "reused-pid", {**me, "started": "1"}),
        stage(tmp_path, "old-foreign", {**me, "host": "elsewhere"}, month),
        stage(tmp_path, "old-dead-foreign", {**me, "host": "elsewhere", "pid": dead_pid}, month),
        stage(tmp_path, "old-without-owner", None, month),
        stage(tmp_path, "old-nonsense", "not json", month),
        stage(tmp_path, "old-list", [1], month),
    ]
    kept = [
        stage(tmp_path, "mine", me),
        stage(tmp_path, "mine-for-a-month", me, month),
        stage(tmp_path, "parent", {**me, "pid": os.getppid(), "started": st._start_time(os.getppid())}, month),
        stage(tmp_path, "without-start-time", {**me, "started": None}, month),
        stage(tmp_path, "foreign", {**me, "host": "elsewhere", "pid": dead_pid}),
        stage(tmp_path, "just-made", None),
        stage(tmp_path, "half-written", '{"host": "'),
    ]
    (tmp_path / "file").write_text("not ours")
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (tmp_path / ("f" * 32)).symlink_to(outside)
    assert sweep_staging(tmp_path) == len(gone)
    assert not any(folder.exists() for folder in gone)
    assert all((folder / "1" / "image").is_dir() for folder in kept)
    assert (tmp_path / "file").exists()
    assert outside.is_dir()
    assert sweep_staging(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_case_17_staging_of_a_dead_process_that_nobody_waited_for_is_swept(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = {**st._this_process(), "pid": child.pid, "started": st._start_time(child.pid)}
        left = stage(tmp_path, "child", owner)
        assert sweep_staging(tmp_path) == 0
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert sweep_staging(tmp_path) == 1
        assert not left.exists()


def test_sweeping_where_there_is_nothing(tmp_path):
    assert sweep_staging(tmp_path / "none") == 0


def test_another_users_process_is_alive(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert st._is_alive(os.getpid(), st._start_time(os.getpid()))
    assert st._is_alive(1, None)


def test_the_next_writer_sweeps(tmp_path, dead_pid):
    parent = tmp_path / "staging"
    left = stage(parent, "0" * 32, {**st._this_process(), "pid": dead_pid})
    store = Store(tmp_path)
    build(store, "x", key(1))
    assert not left.exists()
    store.close()
    assert staging_left(tmp_path) == []


def test_case_17_every_process_and_every_store_stages_under_a_name_of_its_own(tmp_path):
    stores = [Store(tmp_path) for _ in range(3)]
    with stores[0].staged() as a, stores[1].staged() as b, stores[0].staged() as c:
        assert len({a, b, c, a.parent, b.parent}) == 5
        assert a.parent == c.parent
        owner = json.loads((a.parent / "owner.json").read_text())
        assert owner == st._this_process()

        def child():
            with stores[0].staged() as d:
                assert d.parent not in {a.parent, b.parent}
                assert json.loads((d.parent / "owner.json").read_text())["pid"] == os.getpid()
            stores[0].close()

        in_fork(child)
        assert a.is_dir()
    for store in stores:
        store.close()
    assert staging_left(tmp_path) == []


def test_case_14_a_child_forked_while_a_thread_holds_the_lock_still_works(store):
    build(store, "x", key(1))

    def child():
        assert build(store, "y", key(2))
        store.close()

    with store._lock:  # as a writer thread does while it makes a directory
        in_fork(child)
    assert store.read_document(key(2)) == b"y"


def test_a_store_is_pickled_as_its_directory_alone(store):
    build(store, "x", key(1))
    other = pickle.loads(pickle.dumps(store))
    assert other.cache_dir == store.cache_dir
    assert other.read_document(key(1)) == b"x"
    assert build(other, "y", key(2))
    other.close()
    assert sorted(store.keys()) == [key(1), key(2)]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077, 0o000])
def test_case_37_the_umask_is_honoured(tmp_path, umask):
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "c")
        write(store, key(1), {"image": ct_like()})
        with store.staged() as staged:
            assert stat.S_IMODE(staged.stat().st_mode) == 0o777 & ~umask
        folders = [p for p in (tmp_path / "c").rglob("*") if p.is_dir()]
        files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
        assert len(folders) >= 9
        assert len(files) == 5
        assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o777 & ~umask}
        assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o666 & ~umask}
        store.close()
    finally:
        os.umask(before)


def test_case_37_the_group_of_a_setgid_directory_is_kept(tmp_path):
    cache_dir = tmp_path / "c"
    cache_dir.mkdir()
    group = next((g for g in os.getgroups() if g != os.getgid()), 12345 if os.geteuid() == 0 else None)
    if group is None:
        pytest.skip("this user has one group only")
    os.chown(cache_dir, -1, group)
    cache_dir.chmod(0o2775)
    store = Store(cache_dir)
    write(store, key(1), {"image": ct_like()})
    entry = [store.entry_path(key(1)), *store.entry_path(key(1)).rglob("*")]
    assert {p.stat().st_gid for p in entry} == {group}
    assert all(p.stat().st_mode & stat.S_ISGID for p in entry if p.is_dir())
    store.close()


def test_keys_are_those_of_entries(store):
    names = [key(i) for i in (1, 2, 0xABCDEF)]
    for name in names:
        build(store, "x", name)
    for foreign in ("zarr.json.bak", "A" * 32, "g" * 32, "0" * 31, "0" * 33, ".nfs0001", "image"):
        (store.root / foreign).mkdir()
    assert sorted(store.keys()) == sorted(names)


@pytest.mark.parametrize(
    "name", ["", "../x", "A" * 32, "0" * 31, "0" * 33, "0" * 31 + "\n", "0" * 31 + "/", "0" * 32 + "\n"]
)
def test_what_is_no_key_never_becomes_a_path(store, name):
    for use in (store.entry_path, store.read_document, lambda n: store.open_shard(n, "x", 3)):
        with pytest.raises(ValueError, match="is not a key"):
            use(name)
    with store.staged() as staged, pytest.raises(ValueError, match="is not a key"):
        store.publish(staged, name)


@pytest.mark.parametrize("name", ["../x", "", "a/b", "zarr.json"])
def test_what_is_no_array_name_never_becomes_a_path(store, name):
    with pytest.raises(ValueError, match="is not the name of an array"):
        store.open_shard(key(1), name, 3)
    with pytest.raises(ValueError, match="is not the name of a group"):
        store.group_path(key(1), name or "..")


def test_a_file_is_no_cache_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheConfigError, match="is a file"):
        Store(tmp_path / "file")


def test_case_18_a_directory_out_of_reach_is_no_reason_to_stop(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "stat", refuse)
    Store("/root/secret/cache")


def other_mount(tmp_path) -> Path | None:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) and shm.stat().st_dev != tmp_path.stat().st_dev else None


def test_case_07_a_reader_on_another_mount_never_sees_part_of_an_entry(tmp_path, monkeypatch):
    mount = other_mount(tmp_path)
    if mount is None:
        pytest.skip("no second file system to write to")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cache_dir = Path(tempfile.mkdtemp(dir=mount))
    for name in ("mkstemp", "mkdtemp", "mktemp", "gettempdir", "NamedTemporaryFile", "TemporaryDirectory"):
        monkeypatch.setattr(tempfile, name, lambda *_, **__: pytest.fail("the system's temporary folder was used"))
    try:
        store, reader = Store(cache_dir), Store(cache_dir)
        array = ct_like()
        started, stop = threading.Event(), threading.Event()
        trouble, seen = [], set()

        def poll():
            while not stop.is_set():
                for name in list(reader.keys()):
                    started.set()
                    try:
                        assert same_bits(read(reader, name, "image"), array)
                    except BaseException as e:  # noqa: BLE001
                        trouble.append(e)
                        return
                    seen.add(name)

        poller = threading.Thread(target=poll)
        poller.start()
        for i in range(40):
            write(store, key(i), {"image": array})
        assert started.wait(30)
        stop.set()
        poller.join()
        assert not trouble
        assert seen
        store.close()
        assert sorted(p.name for p in cache_dir.iterdir()) == ["cache.zarr", "staging"]
    finally:
        shutil.rmtree(cache_dir, ignore_errors=True)


def test_case_07_nothing_is_written_outside_of_the_cache_directory(tmp_path):
    changed = run_script(
        """
        import os, sys
        import numpy as np
        from zcache.cache import Cache

        changes = []

        def note(event, args):
            if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                changes.append(args[0])
            elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "shutil.move"):
                changes.extend(a for a in args if isinstance(a, (str, os.PathLike)))

        cache = Cache(sys.argv[1])  # its counters are shared memory, for which the standard library picks the place
        sys.addaudithook(note)
        with cache:
            for i in range(3):
                cache.put(f"{i:032x}", {"image": np.arange(9999) % 77})
            cache.flush()
            assert cache.stats.stored == 3
            changed = [os.path.abspath(p) for p in changes]
        assert len(changed) > 20
        print(*(p for p in changed if not p.startswith(sys.argv[1])), sep=";")
        """,
        tmp_path / "elsewhere" / "cache",
        folder=tmp_path,
    )
    assert changed == str(tmp_path / "elsewhere")  # the parent of the cache directory was missing


def test_case_05_a_writer_killed_at_any_time_leaves_whole_entries_only(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(
        "import sys\n"
        "from tests.support import REPOSITORY, ct_like, key, write\n"
        "from zcache.storage.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "image = ct_like()\n"
        "for i in range(10**6):\n"
        "    write(store, key(i % 50), {'image': image}, replace=i % 3 == 0)\n"
    )
    cache_dir = tmp_path / "c"
    store = Store(cache_dir)
    command = [sys.executable, str(script), str(cache_dir)]
    for delay in (0.0, 0.02, 0.05):
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        while not list(store.keys()) and child.poll() is None:
            time.sleep(0.005)
        time.sleep(delay)
        assert child.poll() is None
        child.kill()
        child.wait()
        names = list(store.keys())
        assert names
        for name in names:
            assert same_bits(read(store, name, "image"), ct_like())
    assert files_under(cache_dir / "staging")  # what the last one left
    write(store, key(99), {"image": np.ones(9)})
    store.close()
    assert staging_left(cache_dir) == []
