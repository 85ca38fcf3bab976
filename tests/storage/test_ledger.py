"""What shared files take, as the ledger says: right after any history, and locked no longer than it has to be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

import pytest

from tests.storage.test_shm import PAGE, joined, name, put, read
from tests.stress.board import fork
from zcache.storage import ledger, shm
from zcache.storage.ledger import Ledger
from zcache.storage.membership import locked


def test_a_fork_while_the_ledger_is_locked_does_not_lock_it_for_the_life_of_the_child(tmp_path, monkeypatch):
    """DataLoader workers are forked while writers of the parent put items into memory."""
    monkeypatch.setattr(ledger, "PATIENCE_S", 30)
    directory = joined(tmp_path)
    inside, go_on = threading.Event(), threading.Event()
    original = Ledger.write

    def write(*args):
        inside.set()
        assert go_on.wait(30)
        original(*args)

    with monkeypatch.context() as m:
        m.setattr(Ledger, "write", write)
        thread = threading.Thread(target=put, args=(directory, 1))
        thread.start()
        assert inside.wait(30)
        reading, writing = os.pipe()
        pid = fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        go_on.set()
        thread.join()
    with (directory.path / "ledger").open("rb+") as f:
        assert locked(f.fileno(), fcntl.LOCK_EX)
    assert put(directory, 2) == 0
    os.close(writing)
    os.waitpid(pid, 0)
    os.close(reading)
    directory.leave()


def test_what_is_being_written_already_counts_against_what_the_file_system_has_left(tmp_path, monkeypatch):
    """Otherwise several writers at once fill what is left to PyTorch, whose workers then die of bus errors."""
    n_blocks = 64 * 1024 * 1024 // PAGE

    class Small:
        f_blocks, f_frsize = n_blocks, PAGE
        f_bavail = 32 * 1024 * 1024 // PAGE + 10  # ten pages beyond what is spared

    monkeypatch.setattr(shm.os, "fstatvfs", lambda _: Small)
    directory = joined(tmp_path, 1000 * PAGE)
    first, _ = directory.create(name(1), 6 * PAGE)
    with first:
        assert directory.create(name(2), 6 * PAGE) == (None, 0)
        second, _ = directory.create(name(3), 4 * PAGE)
        with second:
            assert directory.create(name(4), PAGE) == (None, 0)
    directory.leave()


def test_what_a_killed_writer_had_begun_is_taken_off_even_if_what_was_wanted_does_not_fit(tmp_path):
    directory = joined(tmp_path, 10 * PAGE)
    for i in range(3):
        put(directory, i)
    pid = fork()
    if pid == 0:
        joined(tmp_path, 10 * PAGE).create(name(8), 6 * PAGE)
        os._exit(0)
    os.waitpid(pid, 0)
    assert directory.used_bytes() == 9 * PAGE
    assert put(directory, 9, 8) is None
    assert directory.used_bytes() == 3 * PAGE
    assert put(directory, 9, 4) == 0
    directory.leave()


@pytest.mark.parametrize("moment", ["both", "renamed"])
def test_a_file_that_gets_its_name_while_all_are_counted_counts_once(tmp_path, monkeypatch, moment):
    directory = joined(tmp_path, 6 * PAGE, keep=True)
    put(directory, 1, 2)
    new, _ = directory.create(name(2), 3 * PAGE)
    listdir = os.listdir

    def publish_meanwhile(fd):
        if moment == "both":  # linked, and its first name still there
            with contextlib.suppress(FileExistsError):
                os.link(new._part, name(2), src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            return listdir(fd)
        found = listdir(fd)
        with contextlib.suppress(FileNotFoundError):
            new.write(0, bytes([2]) * (3 * PAGE))
            new.publish()
            new.__exit__()
        return found

    monkeypatch.setattr(shm.os, "listdir", publish_meanwhile)
    assert put(directory, 3, 2) is None  # has all counted
    monkeypatch.undo()
    assert directory.used_bytes() == 5 * PAGE
    if moment == "both":
        new._published = True
        new.__exit__()
    assert directory.used_bytes() == 5 * PAGE
    assert read(directory, 2) is not None
    directory.leave()
