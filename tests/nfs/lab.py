"""Two hosts and an NFS server in one User-Mode-Linux kernel: a plain process here, whose end is the end of it all."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.nfs.guest import boot
from tests.nfs.line import Call, GuestError, Line, StuckError
from tests.nfs.packages import UNPACKED, find

__all__ = ["CALL_S", "KINDS", "Lab", "Worker"]

KINDS = {
    "4.2": "vers=4.2",
    "3": "vers=3,mountport=20048,mountproto=tcp,mountvers=3,nolock",
    "4.2 actimeo=0": "vers=4.2,actimeo=0",
    "3 actimeo=0": "vers=3,mountport=20048,mountproto=tcp,mountvers=3,nolock,actimeo=0",
}
"""Kinds of mount. ``nolock``: zcache needs no locks, and without their daemons the lab is up sooner."""

CALL_S = 60.0
"""Nothing that a test asks for may take longer than this and what it is told to take."""

_PLAIN = {"uid": 0, "gid": 0, "umask": 0o022, "pid_from": 0}
_MARKED_BY = {"hold", "restrict"}  # commands after which a process is not what it was
_BOOT_S = 120.0
_END_S = 20.0
# Waits for the end of its input, which comes with the end of the tests, even if that is a SIGKILL.
_GUARD = 'read -r _; kill -9 "-$1"; rm -rf -- "$2"'
_MEMORY_MB = 768
_DISK_MB = 1024
_MACHINES = ("server", *boot.HOSTS)


class Lab:
    """The running guest.

    Raises
    ------
    StuckError
        It does not come up; the message has what it wrote to its console.
    """

    def __init__(self) -> None:
        self.stuck = False
        needed = (_MEMORY_MB + _DISK_MB) * 2**20
        shm = Path("/dev/shm")
        in_memory = shm.is_dir() and shutil.disk_usage(shm).free > needed
        self._folder = Path(tempfile.mkdtemp(prefix="zcache-nfs-", dir=shm if in_memory else None))
        self._console = self._folder / "console"
        self._idle: dict[tuple[str, str], list[Worker]] = {}
        self.lines: dict[str, Line] = {}
        self._guest: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            self._start()
            for line in self.lines.values():
                line.wait_ready(_BOOT_S)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        disk = self._folder / "disk"
        with disk.open("wb") as f:
            f.truncate(_DISK_MB * 2**20)
        make = [str(find("mkfs.ext4")), "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(disk)]
        subprocess.run(make, check=True, timeout=_BOOT_S)
        repository = Path(__file__).parents[2]
        unpacked = UNPACKED / "root"
        environment = {
            "LAB_PACKAGES": unpacked if unpacked.is_dir() else "",
            "LAB_MODULES": find("usr/lib/uml/modules"),
            "PYTHONPATH": repository,
            "TMPDIR": "/mnt/tmp",
        }
        inner: list[int] = []
        lines = []
        for i, name in enumerate(_MACHINES):
            (guest_in, write_fd), (read_fd, guest_out) = os.pipe(), os.pipe()
            self.lines[name] = Line(name, read_fd, write_fd, self._note_stuck)
            inner += [guest_in, guest_out]
            lines.append(f"ssl{i}=fd:{guest_in},fd:{guest_out}")
        command = [
            *(str(find("linux.uml")), f"mem={_MEMORY_MB}M", f"umid=zcache{os.getpid()}", f"uml_dir={self._folder}/"),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"ubd0={disk}"),
            *("con=null", "con0=null,fd:1", "quiet", "panic=-1", *lines),
            *(f"{name}={value}" for name, value in environment.items()),
            *(f"init={sys.executable}", "--", "-X", "faulthandler", boot.__file__),
        ]
        with self._console.open("wb") as console:
            self._guest = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self._folder)},  # its memory is a file there
                pass_fds=inner,
                start_new_session=True,
            )
        for fd in inner:
            os.close(fd)
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(self._guest.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def worker(self, host: str, kind: str = "", **how: int) -> Worker:
        """Give a process on a host, which finds the export through a mount of a kind.

        Parameters
        ----------
        host : str
            ``"a"`` or ``"b"``, or ``"server"``, which has the export itself.
        kind : str
            One of `KINDS`.
        **how
            ``uid``, ``gid``, ``umask`` of the process; ``pid_from``, the least process id that it may have. Without
            any of them, a process that another test has left as good as new will do: to fork is slow in the guest.
        """
        idle = self._idle.get((host, kind))
        if idle and not how:
            return idle.pop()
        line = self.lines[host]
        where = "/mnt/export"
        if host != "server":
            where = line.call(0, "mount", name=kind.replace(" ", "-"), options=KINDS[kind]).result(CALL_S)
        born = line.call(0, "fork", **{**_PLAIN, **how}).result(CALL_S)
        return Worker(line, kind, born["worker"], born["pid"], where, plain=not how)

    def give_back(self, worker: Worker) -> None:
        """Keep a process for the next test if nothing tells it from a new one; end it otherwise."""
        if worker.is_as_new():
            self._idle.setdefault((worker.host, worker.kind), []).append(worker)
        else:
            worker.kill()

    def _note_stuck(self) -> str:
        """Tell where every process of the guest is, and what its kernel said last."""
        if self.stuck:  # asked by itself
            return ""
        self.stuck = True
        parts = []
        for line in self.lines.values():
            with contextlib.suppress(StuckError, GuestError, OSError):
                parts.append(line.call(0, "stacks").result(10))
        parts.append(self._console.read_text("utf-8", "replace")[-4000:])
        return "\n".join(parts)

    def close(self) -> None:
        """End the guest and remove all that it used."""
        for line in self.lines.values():
            line.close()
        if self._guest is None or self._guard is None:
            shutil.rmtree(self._folder)
            return
        self._guard.communicate(timeout=_END_S)
        self._guest.wait(_END_S)


class Worker:
    """A process in the guest that uses a cache (see `tests.nfs.guest.worker`)."""

    def __init__(self, line: Line, kind: str, number: int, pid: int, where: str, *, plain: bool) -> None:
        self.host, self.kind, self.pid, self.where = line.name, kind, pid, where
        self._line, self._number = line, number
        self._plain = plain
        self._calls: list[Call] = []

    def start(self, do: str, **arguments: Any) -> Call:
        """Send a command; `Call.result` waits for its answer."""
        self._plain = self._plain and do not in _MARKED_BY
        self._calls.append(self._line.call(self._number, do, **arguments))
        return self._calls[-1]

    def do(self, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        return self.start(do, **arguments).result(CALL_S)

    def is_as_new(self) -> bool:
        """Whether it runs, has nothing to do, and nothing was changed in it for good."""
        return self._plain and all(call.answered for call in self._calls)

    def kill(self) -> None:
        """End it as the out-of-memory killer would, and wait until it has ended."""
        self._plain = False
        self._line.call(0, "kill", of=self._number).result(CALL_S)
        self._line.wait_end(self._number, CALL_S)
