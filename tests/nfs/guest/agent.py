"""One machine of the lab as the tests see it: obeys JSON lines from a serial line and relays them to worker processes.

The agent has imported zcache already and forks its workers, so that a worker is there in an instant.
It never touches NFS itself: whatever hangs, it still answers, tells where the others hang, and kills them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nfs.guest import linux
from tests.nfs.guest.worker import Worker

_POLL_S = 0.2  # how soon the end of a worker is noticed
_STACK_S = 1.0


@dataclass(frozen=True)
class _Child:
    pid: int
    commands: int
    stacks: Path


class Agent:
    """Serves one line until it is closed.

    Parameters
    ----------
    name : str
        Of the machine, for messages.
    line : int
        File descriptor of the serial line.
    server : str
        Address of the NFS server as this machine reaches it.
    """

    def __init__(self, name: str, line: int, server: str) -> None:
        self._name = name
        self._line = line
        self._server = server
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._last = 0

    def serve(self) -> None:
        """Obey until the line ends."""
        self._selector.register(self._line, selectors.EVENT_READ, _Lines(self._obey))
        self._send({"event": "ready"})
        while True:
            for chosen, _ in self._selector.select(_POLL_S):
                data = os.read(chosen.fd, 65536)
                if data:
                    chosen.data.feed(data)
                elif chosen.fd == self._line:
                    return
                else:
                    self._selector.unregister(chosen.fd)
                    os.close(chosen.fd)
            self._reap()

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode("ascii") + b"\n"
        while data:
            data = data[os.write(self._line, data) :]

    def _obey(self, message: dict[str, Any]) -> None:
        worker = message.pop("worker")
        if worker:
            child = self._children.get(worker)
            if child is not None:  # otherwise its end has been reported, which answers everything
                os.write(child.commands, json.dumps(message).encode("ascii") + b"\n")
            return
        number, operation = message.pop("id"), message.pop("do")
        try:
            value = getattr(self, f"do_{operation}")(**message)
        except Exception:  # noqa: BLE001 - told to the tests
            self._send({"id": number, "error": f"on {self._name}:\n{traceback.format_exc()}"})
        else:
            self._send({"id": number, "value": value})

    def do_mount(self, name: str, options: str) -> str:
        """Mount the server's export, unless it is mounted already; return where."""
        where = f"/mnt/{name}"
        if not os.path.ismount(where):
            source = f"{self._server}:{'/mnt/export' if 'vers=3' in options else '/'}"
            linux.mount(source, where, "nfs", options=f"addr={self._server},mountaddr={self._server},{options}")
        return where

    def do_fork(self, uid: int, gid: int, umask: int, pid_from: int) -> dict[str, int]:
        """Start a worker whose process id is at least `pid_from`."""
        if pid_from:
            self._burn_pids(pid_from)
        self._last += 1
        commands, replies = os.pipe(), os.pipe()
        stacks = Path(f"/mnt/tmp/stacks{self._last}")
        pid = os.fork()
        if pid == 0:
            try:
                for child in self._children.values():  # otherwise they would not see the agent's end
                    os.close(child.commands)
                for fd in (self._line, commands[1], replies[0]):
                    os.close(fd)
                with stacks.open("w", encoding="utf-8") as file:
                    os.setgid(gid)
                    os.setgroups([])
                    os.setuid(uid)
                    os.umask(umask)
                    Worker(commands[0], replies[1], file).serve()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - to the console
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(commands[0])
        os.close(replies[1])
        self._children[self._last] = _Child(pid, commands[1], stacks)
        self._selector.register(replies[0], selectors.EVENT_READ, _Lines(self._send))
        return {"worker": self._last, "pid": pid}

    @staticmethod
    def _burn_pids(pid_from: int) -> None:
        while True:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            if pid + 1 >= pid_from:
                return

    def do_kill(self, of: int) -> None:
        """End a worker as the kernel's out-of-memory killer would."""
        child = self._children.get(of)
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)

    def do_stacks(self) -> str:
        """Tell where every worker is, in Python and in the kernel."""
        for child in self._children.values():
            os.kill(child.pid, signal.SIGUSR1)
        time.sleep(_STACK_S)
        return "\n".join(
            f"--- worker {number} on {self._name}, process {child.pid}, in the kernel: {_kernel_side(child.pid)}\n"
            f"{child.stacks.read_text('utf-8')}"
            for number, child in self._children.items()
        )

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for number, child in list(self._children.items()):
                    if child.pid == pid:
                        os.close(child.commands)
                        del self._children[number]
                        self._send({"event": "exit", "worker": number, "status": os.waitstatus_to_exitcode(status)})


def _kernel_side(pid: int) -> str:
    """Name the functions of the kernel in which each thread of a process sleeps, innermost first."""
    threads = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):  # ended meanwhile
            frames = (task / "stack").read_text("ascii").splitlines()
            threads.append(" < ".join(frame.split()[1].partition("+")[0] for frame in frames[3:]))
    return "; ".join(threads)


class _Lines:
    """Cuts what arrives into JSON lines."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
