"""The lab, started once per process of pytest for all tests on NFS, and what each test takes from it.

The short form, a part of every test run, takes about half a minute. ``make test-nfs`` sets ``ZCACHE_NFS_ROUNDS``: more
entries, more kinds of mount, and the waits for what an NFS client caches for half a minute.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nfs.figures import Figures
from tests.nfs.lab import CALL_S, Lab, Worker
from tests.nfs.line import Call
from tests.nfs.packages import missing

ROUNDS = int(os.environ.get("ZCACHE_NFS_ROUNDS", "1"))
LONG = ROUNDS > 1

MOUNTS = {
    "4.2": ("4.2", "4.2"),
    "3": ("3", "3"),
    "4.2 actimeo=0": ("4.2 actimeo=0", "4.2 actimeo=0"),
    "3 actimeo=0": ("3 actimeo=0", "3 actimeo=0"),
    "4.2 and 3": ("4.2", "3"),
}
"""How the hosts a and b mount the server."""

_SHORT = ("4.2 and 3",)  # both versions at once
_FIGURES = pytest.StashKey[Figures]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = Figures()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mount" in metafunc.fixturenames:
        metafunc.parametrize("mount", MOUNTS if LONG else _SHORT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash[_FIGURES]
    if LONG and figures.rows:
        terminalreporter.section(f"figures of ZCACHE_NFS_ROUNDS={ROUNDS} pytest tests/nfs")
        for line in figures.table():
            terminalreporter.write_line(line)


class Labs:
    """The running lab; a new one if the last one got stuck."""

    def __init__(self) -> None:
        self._lab: Lab | None = None

    def get(self) -> Lab:
        if self._lab is not None and self._lab.stuck:
            self.close()
        if self._lab is None:
            self._lab = Lab()
        return self._lab

    def close(self) -> None:
        if self._lab is not None:
            self._lab.close()
        self._lab = None


@pytest.fixture(scope="session")
def labs() -> Iterator[Labs]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    held = Labs()
    yield held
    held.close()


class Scene:
    """What one test plays with: a cache of its own, processes on the hosts, and the sum of what they counted."""

    def __init__(self, lab: Lab, name: str, mount: str, figures: Figures) -> None:
        self.lab = lab
        self.name = uuid.uuid4().hex  # a name of its own: the hosts would take it for one that they know
        self.counts: dict[str, int] = {}
        self.warnings: list[str] = []
        self._test, self._mount, self._figures = name, mount, figures
        self._workers: list[Worker] = []
        self.server = self.worker("server")
        self.server.do("folder", name=self.name)

    def worker(self, host: str, **how: Any) -> Worker:
        """Start a process on a host with the cache open."""
        kind = "" if host == "server" else MOUNTS[self._mount]["ab".index(host)]
        worker = self.lab.worker(host, kind, **how)
        self._workers.append(worker)
        self.tell(worker, "open", folder=self.folder(worker))
        return worker

    def folder(self, worker: Worker) -> str:
        """Path of the cache as a process sees it."""
        return f"{worker.where}/{self.name}"

    def ask(self, worker: Worker, do: str, **arguments: Any) -> Any:
        """Give a command about the cache's files, and wait."""
        return worker.do(do, cache_dir=self.folder(worker), **arguments)

    def tell(self, worker: Worker, do: str, *, allowed_s: float = 0.0, **arguments: Any) -> Any:
        """Give a command to use the cache, wait, and add up what it counted."""
        return self.together([worker.start(do, **arguments)], allowed_s=allowed_s)[0]

    def together(self, calls: list[Call], *, allowed_s: float = 0.0) -> list[Any]:
        """Wait for all, and add up what they counted."""
        replies = [call.result(CALL_S + allowed_s) for call in calls]
        for reply in replies:
            self.warnings += reply["warnings"]
            for name, n in reply["counts"].items():
                self.counts[name] = self.counts.get(name, 0) + n
            self._figures.add(self._test, self._mount, reply["counts"])
        return [reply["value"] for reply in replies]

    def count(self, name: str) -> int:
        return self.counts.get(name, 0)

    def leftovers(self) -> list[str]:
        """What lies in the cache beside its entries."""
        return self.ask(self.server, "listing")

    def close(self) -> None:
        """Give the processes back and remove the cache."""
        for worker in self._workers[1:]:
            if worker.is_as_new():
                worker.do("close")
            self.lab.give_back(worker)
        self.server.do("clear", name=self.name)
        self.lab.give_back(self.server)

    def check(self, *, warnings: int = 0) -> None:
        """Nothing wrong, nothing torn, nothing given up, and no word of it unless it was to be expected."""
        assert {name: n for name, n in self.counts.items() if name in ("wrong", "torn") or "skipped" in name} == {}
        assert len(self.warnings) <= warnings, self.warnings


@pytest.fixture
def nfs(labs, request, pytestconfig) -> Iterator[Scene]:
    """A scene on two hosts; by default nothing may be amiss at the end, and no process may have warned."""
    mount = request.getfixturevalue("mount") if "mount" in request.fixturenames else "4.2"
    name = request.function.__name__.removeprefix("test_").replace("_", " ")
    scene = Scene(labs.get(), name, mount, pytestconfig.stash[_FIGURES])
    yield scene
    if not scene.lab.stuck:
        scene.close()
