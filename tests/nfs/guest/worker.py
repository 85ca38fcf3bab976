"""A process on a host that uses one cache as a training would, and counts what it got."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from tests.nfs.guest import chores, linux
from tests.nfs.guest.items import item, judge, key
from zcache.cache import Cache
from zcache.storage.store import Store, sweep_staging

_MISS = object()
_CHUNKS = (8, 8, 8)  # several per array


class Worker:
    """Obeys one command after another from a pipe.

    Parameters
    ----------
    commands, replies : int
        File descriptors.
    stacks : file
        Where SIGUSR1 writes the stacks of all threads.
    """

    def __init__(self, commands: int, replies: int, stacks: TextIO) -> None:
        self._commands = commands
        self._replies = replies
        faulthandler.register(signal.SIGUSR1, stacks)
        self._released = threading.Event()
        self._cache: Cache | None = None
        self._counts: Counter[str] = Counter()

    def serve(self) -> None:
        with os.fdopen(self._commands, "rb", buffering=0) as lines:
            for line in lines:
                message = json.loads(line)
                number, operation = message.pop("id"), message.pop("do")
                try:
                    reply = {"id": number, "value": self._run(operation, message)}
                except Exception:  # noqa: BLE001 - told to the tests
                    reply = {"id": number, "error": traceback.format_exc()}
                os.write(self._replies, json.dumps(reply).encode("ascii") + b"\n")

    def _run(self, operation: str, arguments: dict[str, Any]) -> Any:
        chore = getattr(chores, operation, None)
        if chore is not None:
            return chore(**arguments)
        self._counts.clear()
        before = self._standing()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            value = getattr(self, f"do_{operation}")(**arguments)
        after = self._standing()
        counts = self._counts + Counter({name: after[name] - before[name] for name in after})
        return {"value": value, "counts": dict(counts), "warnings": [str(w.message) for w in heard]}

    @property
    def cache(self) -> Cache:
        assert self._cache is not None, "open a cache first"
        return self._cache

    def _standing(self) -> Counter[str]:
        if self._cache is None:
            return Counter()
        stats = self._cache.stats
        own = {"written": stats.stored, "raced": stats.already_stored, "misses": stats.misses}
        own |= {"damaged": stats.damaged, "read errors": stats.read_errors}
        return Counter(own | {f"skipped: {reason}": n for reason, n in stats.skipped.items()})

    def do_open(self, folder: str) -> None:
        """Use the cache in a folder from now on."""
        self._cache = Cache(folder, chunks=_CHUNKS)

    def do_close(self) -> None:
        """Finish all writes."""
        self.cache.close()

    def _get(self, number: int) -> bool:
        found = self.cache.get(key(number), _MISS)
        if found is _MISS:
            return False
        verdict = judge(number, found)
        self._counts["read" if verdict == "right" else verdict] += 1
        return True

    def _put(self, number: int, generation: int) -> None:
        """Hand an item over; what comes back from `put` is judged as what is read is."""
        if judge(number, self.cache.put(key(number), item(number, generation))) != "right":
            self._counts["wrong"] += 1

    def do_fill(self, numbers: list[int], generation: int = 0) -> None:
        """Read each item, compute and put what is missing: an epoch. An entry found damaged is waited for."""
        for number in numbers:
            damaged, stored = self.cache.stats.damaged, self.cache.stats.stored
            if self._get(number):
                continue
            self._put(number, generation)
            if self.cache.stats.damaged > damaged:
                self.cache.flush()
                self._counts["healed"] += self.cache.stats.stored - stored
        self.cache.flush()

    def do_meet(self, numbers: list[int], start: float, every: float, generation: int = 0) -> None:
        """Look for each item in vain, then publish it at an appointed time, at which another host does the same."""
        for i, number in enumerate(numbers):
            self._get(number)
            time.sleep(max(0.0, start + i * every - time.monotonic()))
            self._put(number, generation)
            self.cache.flush()

    def do_put(self, numbers: list[int], generation: int = 0, pause: float = 0.0) -> dict[str, float]:
        """Write items one by one; tell when each was there."""
        done = {}
        for number in numbers:
            self._put(number, generation)
            self.cache.flush()
            done[str(number)] = time.monotonic()
            time.sleep(pause)
        return done

    def do_put_while_others_publish(self, number: int, other: int, generation: int) -> None:
        """Put an item; just before anything is taken out of its way, another process of this host publishes another."""
        discard = Store._discard

        def late(store: Store, final: Path) -> None:
            with Cache(self.cache.cache_dir, chunks=_CHUNKS) as another:
                another.put(key(other), item(other))
            discard(store, final)

        Store._discard = late  # type: ignore[method-assign]
        try:
            self._put(number, generation)
            self.cache.flush()
        finally:
            Store._discard = discard  # type: ignore[method-assign]

    def do_hand_over(self, number: int, generation: int = 0) -> None:
        """Put one item and do not wait for it."""
        self._put(number, generation)

    def do_read(self, numbers: list[int], seconds: float = 0.0) -> int:
        """Read all items again and again; return how many the last round found."""
        end = time.monotonic() + seconds
        while True:
            found = sum([self._get(number) for number in numbers])
            if time.monotonic() >= end:
                return found

    def do_read_and_fill(self, numbers: list[int], seconds: float) -> None:
        """Epoch after epoch."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.do_fill(numbers)

    def do_fill_until_read(self, numbers: list[int], seconds: float, generation: int) -> None:
        """Epoch after epoch, until nothing is missing or damaged any more."""
        end = time.monotonic() + seconds
        self.do_fill(numbers, generation)
        while self.do_read(numbers) < len(numbers) and time.monotonic() < end:
            self.do_fill(numbers, generation)

    def do_poll(self, numbers: list[int], seconds: float) -> dict[str, float]:
        """Read until every item has been seen; tell when each was seen first."""
        end = time.monotonic() + seconds
        seen: dict[str, float] = {}
        while len(seen) < len(numbers) and time.monotonic() < end:
            for number in numbers:
                if str(number) not in seen and self._get(number):
                    seen[str(number)] = time.monotonic()
        return seen

    def do_remove(self, numbers: list[int], seconds: float, how: str) -> None:
        """Remove entries over and over, as somebody does who makes room."""
        end = time.monotonic() + seconds
        while True:
            for number in numbers:
                self._counts["removed"] += chores.take_away(str(self.cache.cache_dir), number, how)
            if time.monotonic() >= end:
                return

    def do_hold(self) -> None:
        """From now on stop each write when all its files are there and before it is published, until released."""
        publish, released = Store.publish, self._released

        def held(store: Store, *args: Any, **kwargs: Any) -> bool:
            released.wait()
            return publish(store, *args, **kwargs)

        Store.publish = held  # type: ignore[method-assign]

    def do_release(self) -> None:
        """Let what is held be published, and wait until it is."""
        self._released.set()
        self.cache.flush()

    def do_sweep(self) -> int:
        """Sweep the staging folder as the first write of a process does."""
        return sweep_staging(Path(self.cache.cache_dir, "staging"))

    def do_restrict(self, error: int) -> None:
        """Give up locks, links and whatever else not every network file system has."""
        linux.refuse_beyond_rename(error)

    def do_modes(self) -> dict[str, list[int]]:
        """Tell mode and group of everything in the cache."""
        root = self.cache.cache_dir
        return {
            str(p.relative_to(root)): [int(p.is_dir()), p.lstat().st_mode & 0o7777, p.lstat().st_gid]
            for p in [root, *root.rglob("*")]
        }
