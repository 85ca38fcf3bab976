"""The tests' end of a serial line into the guest: calls with a deadline, over JSON lines."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Call", "GuestError", "Line", "StuckError"]


class GuestError(AssertionError):
    """A command failed in the guest; the message has its traceback."""


class StuckError(AssertionError):
    """No answer in time."""


class Line:
    """A line to one machine of the lab.

    Parameters
    ----------
    name : str
        Of the machine.
    read_fd, write_fd : int
        Pipes that the guest kernel was given as a serial line.
    explain : callable
        Asked once no answer came in time: where does everything hang?
    """

    def __init__(self, name: str, read_fd: int, write_fd: int, explain: Callable[[], str]) -> None:
        self.name = name
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._explain = explain
        self._numbers = itertools.count(1)
        self._rest = b""
        self._ready = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._ended: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_fd, selectors.EVENT_READ)

    def call(self, worker: int, do: str, **arguments: Any) -> Call:
        """Send a command to a worker, or to the machine's agent, which is worker 0."""
        number = next(self._numbers)
        message = {"id": number, "worker": worker, "do": do, **arguments}
        os.write(self._write_fd, json.dumps(message).encode("ascii") + b"\n")
        return Call(self, worker, number, do)

    def wait_ready(self, seconds: float) -> None:
        """Wait until the machine is up."""
        end = time.monotonic() + seconds
        while not self._ready:
            self._pump(end, "boot")

    def wait_end(self, worker: int, seconds: float) -> int:
        """Wait until a worker has ended; return its exit code, negative for a signal."""
        end = time.monotonic() + seconds
        while worker not in self._ended:
            self._pump(end, f"end of worker {worker}")
        return self._ended[worker]

    def answer(self, call: Call, seconds: float) -> Any:
        """Wait for the answer to a call."""
        end = time.monotonic() + seconds
        while call.number not in self._answers:
            if call.worker in self._ended:
                raise GuestError(f"worker {call.worker} on {self.name} ended with {self._ended[call.worker]}")
            self._pump(end, call.do)
        answer = self._answers.pop(call.number)
        if "error" in answer:
            raise GuestError(f"{call.do} on {self.name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        self._selector.close()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _pump(self, end: float, what: str) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise StuckError(f"no answer in time from {self.name}: {what}\n{self._explain()}")
        if not self._selector.select(left):
            return
        data = os.read(self._read_fd, 65536)
        if not data:
            raise StuckError(f"the guest is gone; {self.name} was asked: {what}\n{self._explain()}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if message.get("event") == "ready":
                self._ready = True
            elif message.get("event") == "exit":
                self._ended[message["worker"]] = message["status"]
            else:
                self._answers[message["id"]] = message


class Call:
    """A command under way."""

    def __init__(self, line: Line, worker: int, number: int, do: str) -> None:
        self.worker, self.number, self.do = worker, number, do
        self.answered = False
        self._line = line

    def result(self, seconds: float) -> Any:
        """Wait for the answer."""
        value = self._line.answer(self, seconds)
        self.answered = True
        return value
