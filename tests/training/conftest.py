"""Fixtures of the data sets' tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import zcache.storage.recorder


class Gate(threading.Event):
    """Writers that have begun an entry wait for this event; `begun` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    """Hold every writer of this process, and of those forked from it, back until the event is set."""
    event = Gate()
    original = zcache.storage.recorder.write_entry

    def write_entry(*args, **kwargs):
        event.begun.release()
        assert event.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(zcache.storage.recorder, "write_entry", write_entry)
    yield event
    event.set()
