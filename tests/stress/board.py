"""What the stress drivers share: counts that outlive whoever made them, processes that end in time whatever happens."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
LIFE_S = 60
"""A process of a driver that is still there after this long hangs: it prints its stacks and dies."""

_COUNTS = ("reads", "regions", "misses", "puts", "picks", "flips", "starts", "epochs")
FAILED = 3


class Board:
    """Counts and flags in memory shared with forked processes; a SIGKILL leaves them as they are.

    Parameters
    ----------
    n_slots : int
        Processes alive at the same time: each counts in a slot of its own, so that no lock is needed.
    n_keys : int
        Keys that have flags.
    """

    def __init__(self, n_slots: int, n_keys: int) -> None:
        cells = n_slots * (len(_COUNTS) + 1)
        memory = mmap.mmap(-1, 8 * cells + 2 * n_keys)
        self._table = np.frombuffer(memory, np.int64, cells).reshape(n_slots, -1)
        self.known = np.frombuffer(memory, np.bool_, n_keys, 8 * cells)  # seen on disk, by whomever
        self.damaged = np.frombuffer(memory, np.bool_, n_keys, 8 * cells + n_keys)  # since it was last healed

    def add(self, slot: int, name: str, amount: int = 1) -> None:
        self._table[slot, _COUNTS.index(name)] += amount

    def enter(self, slot: int) -> None:
        """Let the driver know the process of a slot."""
        self._table[slot, -1] = os.getpid()

    def pid(self, slot: int) -> int:
        return int(self._table[slot, -1])

    def sums(self) -> dict[str, int]:
        return dict(zip(_COUNTS, self._table[:, :-1].sum(axis=0).tolist(), strict=True))


def watch(life_s: int = LIFE_S) -> None:
    """End this process, with the stacks of all threads on stderr, if it lives longer than this from now on.

    A signal and not `faulthandler.dump_traceback_later`: that one's thread does not survive a fork, and a child that
    sets it anew waits for ever for the thread of its parent (seen with Python 3.11).
    """
    faulthandler.unregister(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(life_s)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: fork with threads is what is tested
        return os.fork()


class Crew:
    """Forked processes of one round, in a process group of their own, to be killed one by one or all together.

    A pipe that all of them and their descendants hold open tells when the last is gone.
    """

    def __init__(self) -> None:
        self._alive, self._held = os.pipe()
        self.pids: list[int] = []

    def start(self, body: Callable[[], object]) -> None:
        group = self.pids[0] if self.pids else 0
        pid = fork()
        if pid == 0:
            try:
                os.setpgid(0, group)
                watch()
                body()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - reported through the exit status
                traceback.print_exc()
            finally:
                os._exit(FAILED)
        self.pids.append(pid)
        with contextlib.suppress(OSError):  # the child was faster, or is gone
            os.setpgid(pid, group or pid)

    def is_member(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self.pids[0]
        except ProcessLookupError:
            return False

    def finish(self) -> list[int]:
        """Kill who is left, wait until all are gone; return how those ended that were started here."""
        os.close(self._held)
        os.set_blocking(self._alive, False)
        deadline = time.monotonic() + LIFE_S
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[0], signal.SIGKILL)  # again and again: one may be forking another
            if select.select([self._alive], [], [], 0.005)[0]:
                break
            assert time.monotonic() < deadline, "processes that cannot be killed"
        os.close(self._alive)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def until(condition: Callable[[], bool], what: str, patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def run_driver(module: str, arguments: Sequence[object], timeout_s: float) -> dict[str, Any]:
    """Run a driver in a session of its own; return the figures that it prints as JSON in its last line.

    Whatever happens, nothing of it is left: a driver that hangs is asked for its stacks first.
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-m", module, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
        hung = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            hung = True
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        output.seek(0)
        said, printed = log.read()[-20_000:], output.read()
    assert not hung, f"{module} hung for {timeout_s} s:\n{said}"
    assert process.returncode == 0, f"{module} ended with status {process.returncode}:\n{printed}\n{said}"
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return figures


def report(figures: dict[str, Any]) -> None:
    """Print figures for `run_driver`."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
