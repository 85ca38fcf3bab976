"""Who takes part in a shared directory: after forks at any moment, under any umask, and where others have been."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.stress.board import fork
from zcache.errors import CacheConfigError
from zcache.storage import membership
from zcache.storage.membership import Membership


def in_child(function):
    """Run a function in a forked child; return its exit status."""
    pid = fork()
    if pid == 0:
        try:
            function()
        except BaseException:  # noqa: BLE001 - the child is a copy of pytest
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def idle_child():
    """Fork a child that does nothing until the file descriptor that is returned is closed; return its pid, too."""
    reading, writing = os.pipe()
    ready, tell = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(writing)
        os.write(tell, b"x")
        os.read(reading, 1)
        os._exit(0)
    assert os.read(ready, 1)
    for fd in (reading, ready, tell):
        os.close(fd)
    return pid, writing


def end(child):
    pid, writing = child
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0


def descriptors():
    return sorted(p.name for p in Path("/proc/self/fd").iterdir())


def test_a_child_takes_no_part_by_being_forked(tmp_path):
    """Its inherited locks would keep a directory that a killed parent used from ever being the last one's to remove."""
    member, other = Membership(tmp_path), Membership(tmp_path)
    child = idle_child()
    try:
        path = member.path
        member._lock_fd, fd = -1, member._lock_fd  # as if the parent died: no more than its descriptors are closed
        os.close(fd)
        member.abandon()
        other.leave()
        assert not path.exists()
    finally:
        end(child)


def test_a_child_does_not_see_what_it_inherited(tmp_path):
    member = Membership(tmp_path)
    assert in_child(lambda: member.fd == -1 or os._exit(2)) == 0
    assert in_child(member.leave) == 0
    assert member.path.is_dir()
    member.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_while_another_thread_joins_holds_nobody_up(tmp_path, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    original = Membership._mend

    def mend(self):
        inside.set()
        assert go_on.wait(30)
        original(self)

    joined = []
    with monkeypatch.context() as m:
        m.setattr(Membership, "_mend", mend)
        thread = threading.Thread(target=lambda: joined.append(Membership(tmp_path)))
        thread.start()
        assert inside.wait(30)
        child = idle_child()  # while the other thread holds the directory for itself alone
        go_on.set()
        thread.join()
    try:
        second = Membership(tmp_path)
        second.leave()
        joined[0].leave()
        assert list(tmp_path.iterdir()) == []
    finally:
        end(child)


def test_joining_and_leaving_keeps_nothing_open(tmp_path):
    Membership(tmp_path).leave()
    before = descriptors()
    for _ in range(20):
        a, b = Membership(tmp_path), Membership(tmp_path)
        a.leave()
        b.leave()
        a.leave()
    assert descriptors() == before
    (tmp_path / a.path.name).mkdir(mode=0o755)
    (tmp_path / a.path.name).chmod(0o755)
    for _ in range(20):
        with pytest.raises(CacheConfigError):
            Membership(tmp_path)
    assert descriptors() == before


def test_others_join_while_much_is_being_removed(tmp_path, monkeypatch):
    """Freeing the memory of a large run that was killed takes longer than anybody waits for a lock."""
    removing, go_on = threading.Event(), threading.Event()

    def clear_up(self):
        removing.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Membership, "_clear_up", clear_up)
    first = []
    thread = threading.Thread(target=lambda: first.append(Membership(tmp_path)))
    thread.start()
    assert removing.wait(30)
    second = Membership(tmp_path)
    go_on.set()
    thread.join()
    second.leave()
    first[0].leave()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_below_a_link_is_one_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    a, b = Membership(tmp_path / "link"), Membership(tmp_path / "real")
    assert os.fstat(a.fd).st_ino == os.fstat(b.fd).st_ino
    b.leave()
    assert a.path.is_dir()
    a.leave()
    assert list((tmp_path / "real").iterdir()) == []


def as_nobody(base, umask):
    """Join without a privilege and under an umask; leave 3 as exit status if it was refused."""

    def job():
        os.setgroups([])
        os.setresgid(12345, 12345, 12345)
        os.setresuid(12345, 12345, 12345)
        os.umask(umask)
        try:
            member = Membership(base)
        except (CacheConfigError, OSError):
            os._exit(3)
        member.leave()

    return in_child(job)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def public(tmp_path_factory):
    """A directory that everybody may use, as /dev/shm is; its parents can be entered."""
    path = tmp_path_factory.mktemp("public")
    above = [p for p in path.parents if p.stat().st_uid == os.geteuid() and p.stat().st_mode & 0o001 == 0]
    modes = [p.stat().st_mode for p in above]
    for p in above:
        p.chmod(0o711)
    path.chmod(0o1777)
    yield path
    for p, mode in zip(above, modes, strict=True):
        p.chmod(mode)


@needs_root
@pytest.mark.parametrize("umask", [0o777, 0o400, 0o200, 0o100])
def test_an_umask_that_forbids_everything_is_refused_and_leaves_nothing_in_the_way(public, umask):
    assert as_nobody(public, umask) == 3
    assert list(public.iterdir()) == []
    assert as_nobody(public, 0o022) == 0
    assert list(public.iterdir()) == []


@needs_root
def test_another_user_of_the_same_machine_has_a_directory_of_its_own(public):
    """As in two containers that share /dev/shm."""
    member = Membership(public)
    assert as_nobody(public, 0o077) == 0
    assert list(public.iterdir()) == [member.path]
    member.leave()


@needs_root
def test_a_place_that_may_not_be_written_to_is_an_error(public):
    public.chmod(0o555)
    assert as_nobody(public, 0o077) == 3
    assert list(public.iterdir()) == []


def test_the_lock_of_one_who_was_killed_is_free(tmp_path):
    pid = fork()
    if pid == 0:
        Membership(tmp_path)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    (left,) = tmp_path.iterdir()
    with (left / "in-use").open("rb+") as f:
        assert membership.locked(f.fileno(), fcntl.LOCK_EX)
    member = Membership(tmp_path)
    assert member.path == left
    member.leave()
    assert list(tmp_path.iterdir()) == []
