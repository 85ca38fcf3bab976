"""Processes that fill, read and mend one cache, killed at random moments; what is left is checked after every round.

`python -m tests.stress.crash ROUNDS SECONDS SEED` ends after so many rounds or seconds and prints figures. Every few
rounds begin with a directory that does not exist yet. All processes are forked from one that has no torch, so that a
round takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.stress.board import Board, Crew, fork, report, until, watch
from tests.stress.items import MISS, check, check_picks, image, item, query, random_box, warm_up
from tests.support import key, same_bits
from zcache.cache import Cache
from zcache.errors import ZCacheWarning
from zcache.storage.entry import Entry
from zcache.storage.store import sweep_staging

_CREW = 4
_ROUNDS_IN_A_FOLDER = 10
_KEYS_IN_A_ROUND = 30
_N_KEYS = _ROUNDS_IN_A_FOLDER * _KEYS_IN_A_ROUND
_DAY_S = 86_400


class Worker:
    """One process that uses the cache until it is killed.

    Parameters
    ----------
    cache : Cache
        Its own, or one that its parent has used before.
    board : Board
        Where it counts.
    slot : int
        Where on the board.
    n_keys : int
        The items 0 to `n_keys` are asked for.
    mend : bool
        Whether entries are being damaged meanwhile.
    """

    def __init__(self, cache: Cache, board: Board, slot: int, n_keys: int, seed: int, *, mend: bool) -> None:
        self.cache, self.board, self.slot, self.n_keys, self.mend = cache, board, slot, n_keys, mend
        self.rng = np.random.default_rng(seed)
        self.fresh: set[int] = set()  # handed over, perhaps not yet on disk
        board.enter(slot)

    def count(self, name: str, amount: int = 1) -> None:
        self.board.add(self.slot, name, amount)

    def fill(self) -> None:
        """Ask for every item in an order of its own, and hand over what is missing: what training does."""
        while True:
            for i in self.rng.permutation(self.n_keys).tolist():
                self.use(i)
                if self.rng.random() < 0.05:
                    self.flush()
            assert self.mend or not self.cache.stats.damaged, "an entry that nobody touched counts as damaged"
            assert not self.cache.stats.skipped, f"a living writer could not write: {self.cache.stats.skipped}"
            assert not self.cache.stats.not_indexed, "an index could not be written"

    def use(self, i: int) -> None:
        known = bool(self.board.known[i])  # before the entry is looked for: it may appear meanwhile
        found = self.cache.get(key(i), MISS)
        if found is MISS:
            self.count("misses")
            assert self.mend or not known, f"item {i} was there and is gone"
            check(self.cache.put(key(i), item(i), query=(lambda _tree: query(i)) if i % 3 == 0 else None), i)
            self.fresh.add(i)
            self.count("puts")
            return
        check(found, i)
        self.count("reads")
        if i not in self.fresh:
            self.board.known[i] = True
        self.look_closer(i)

    def look_closer(self, i: int) -> None:
        """Read a box of an item; pick voxels from its index, or have one made."""
        expected = image(i)
        box = random_box(expected.shape, self.rng)
        part = self.cache.get_region(key(i), "image", box)
        if part is not None:
            assert same_bits(part, np.ascontiguousarray(expected[tuple(slice(a, b) for a, b in box)])), f"box of {i}"
            self.count("regions")
        picks = self.cache.using(key(i), lambda entry: check_picks(entry, i, self.rng), MISS)
        if picks == 0 and i % 3 == 1:
            self.cache.add_index(key(i), query(i))
        elif picks is not MISS:
            self.count("picks", picks)

    def flush(self) -> None:
        self.cache.flush()
        self.board.known[sorted(self.fresh)] = True
        self.fresh.clear()

    def list_all(self) -> None:
        """Read whatever is listed (case 35): while others write, every name that appears is a whole entry."""
        while True:
            for name in list(self.cache.keys()):
                i = int(name, 16)
                found = self.cache.get(name, MISS)
                if found is MISS:
                    assert self.mend, f"item {i} is listed and cannot be read"
                    continue
                check(found, i)
                self.count("reads")
                self.board.known[i] = True
            time.sleep(0.001)

    def with_child(self) -> None:
        """Hand some items over and fork while they are written; parent and child go on with the same cache."""
        for i in self.rng.permutation(self.n_keys)[:8].tolist():
            self.use(i)
        if fork() == 0:
            watch()
            self.slot += _CREW
            self.fresh.clear()  # the parent's to write
            self.rng = np.random.default_rng(self.slot)
            self.board.enter(self.slot)
            self.fill()
        self.fill()

    def vandalise(self) -> None:
        """Flip a byte here and there, in whatever file of an entry; sometimes cut one short."""
        while True:
            time.sleep(self.rng.exponential(0.004))
            names = list(self.cache.keys())
            if not names:
                continue
            name = names[self.rng.integers(len(names))]
            self.board.damaged[int(name, 16)] = True
            paths = [p for p in self.cache._store.entry_path(name).rglob("*") if p.is_file()]
            if paths:
                with contextlib.suppress(FileNotFoundError):  # mended meanwhile
                    self._damage(paths[self.rng.integers(len(paths))])

    def _damage(self, path: Path) -> None:
        with path.open("r+b") as f:
            size = f.seek(0, os.SEEK_END)
            at = int(self.rng.integers(size))
            if self.rng.random() < 0.1:
                f.truncate(at)
            else:
                f.seek(at)
                byte = f.read(1)[0] ^ int(self.rng.integers(1, 256))
                f.seek(at)
                f.write(bytes([byte]))
        self.count("flips")


class Folder:
    """One cache directory over some rounds, and what the driver demands of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.board = Board(2 * _CREW, _N_KEYS)
        self.there: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.cache = Cache(path, on_error="raise")  # what some workers inherit; it stages for as long as the folder
        self.guard = self.cache._store.staged()
        self.mark = self.guard.__enter__() / "mark"
        self.mark.write_text("of a living writer")

    def round(self, n_keys: int, rng: random.Random, *, mend: bool) -> None:
        crew = Crew()
        try:
            for slot in range(_CREW):
                crew.start(self._job(slot, n_keys, rng, mend=mend))
            time.sleep(rng.choice((0.05, 0.2, 1.0)) * rng.random())
            for pid in rng.sample(crew.pids, rng.randrange(_CREW + 1)):
                time.sleep(rng.expovariate(1 / 0.08))
                os.kill(pid, signal.SIGKILL)  # not yet waited for: nobody else has its number
        finally:
            ends = crew.finish()
        assert set(ends) == {-signal.SIGKILL}, f"a process failed by itself: {ends}"
        self.counts["kills"] += len(ends)
        self.counts["rounds"] += 1
        self._check_entries()
        self._check_staging()

    def _job(self, slot: int, n_keys: int, rng: random.Random, *, mend: bool) -> Callable[[], None]:
        inherits, seed = rng.random() < 0.3, rng.getrandbits(32)
        roles = [Worker.fill, Worker.fill, Worker.with_child, Worker.list_all]
        role = Worker.vandalise if mend and slot == 0 else rng.choice(roles)

        def job() -> None:
            warnings.simplefilter("ignore" if mend else "error", ZCacheWarning)
            usual = {"on_error": "warn" if mend else "raise", "writers": 1 + slot % 2}
            cache = self.cache if inherits and not mend else Cache(self.path, **usual)
            role(Worker(cache, self.board, slot, n_keys, seed, mend=mend))

        return job

    def _check_entries(self) -> None:
        """Every entry is whole and right or absent, and none that was seen is lost; then mend what was damaged."""
        damaged = self.board.damaged
        with Cache(self.path, on_error="raise", read_only=True) as cache:
            there = set(map(int, cache.keys(), itertools.repeat(16)))
            whole = {i for i in there if not damaged[i] and self._read(cache, i)}
        expected = self.there | set(np.flatnonzero(self.board.known).tolist())
        lost = {i for i in expected - whole if not damaged[i]}
        assert not lost, f"lost: {sorted(lost)}"
        self.counts["entries written"] += len(whole - self.there)
        self.there |= whole
        self._mend(np.flatnonzero(damaged).tolist())
        self.board.known[sorted(self.there)] = True
        damaged[:] = False

    def _mend(self, damaged: list[int]) -> None:
        with warnings.catch_warnings(), Cache(self.path) as cache:
            warnings.simplefilter("ignore", ZCacheWarning)
            for i in damaged:
                if not self._read(cache, i):
                    cache.put(key(i), item(i))
            cache.flush()
            self.counts["healed by the driver"] += cache.stats.stored
            assert all(self._read(cache, i) for i in damaged), "an entry was not mended"
            assert not cache.stats.skipped
        self.there.update(damaged)

    def _read(self, cache: Cache, i: int) -> bool:
        rng = np.random.default_rng(i)

        def read(entry: Entry) -> bool:
            check(cache.load(entry), i)
            self.counts["picks"] += check_picks(entry, i, rng)
            return True

        found: bool = cache.using(key(i), read, False)
        self.counts["reads"] += found
        return found

    def _check_staging(self) -> None:
        """What the dead left is swept, at once if it says whose it is, else by age; what the living build stays."""
        parent, own = self.path / "staging", self.mark.parents[1]

        def left() -> list[Path]:
            sweep_staging(parent)
            return [folder for folder in parent.iterdir() if folder != own]

        self.counts["staging left by the killed"] += sum(folder != own for folder in parent.iterdir())
        # A process may have died before it had said who it is; another one while it removed what a dead one had left.
        until(lambda: not any((folder / "owner.json").is_file() and _owner(folder) for folder in left()), "a sweep")
        for folder in left():
            self.counts["of these without owner"] += 1
            os.utime(folder, (time.time() - 2 * _DAY_S,) * 2)
        assert not left(), f"staging of dead processes stays: {left()}"
        assert self.mark.is_file(), "the staging of a living writer was swept"

    def close(self) -> None:
        self.guard.__exit__(None, None, None)
        self.cache.close()
        assert not list((self.path / "staging").iterdir())


def _owner(folder: Path) -> bytes:
    try:
        return (folder / "owner.json").read_bytes()
    except FileNotFoundError:
        return b""


@contextlib.contextmanager
def _folder(parent: Path, n: int) -> Iterator[Folder]:
    folder = Folder(parent / f"{n}" / "cache")
    yield folder
    folder.close()
    shutil.rmtree(folder.path.parent)


def main(rounds: int, seconds: float, seed: int) -> Counter[str]:
    """Run; return the figures."""
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    warm_up()

    def goes_on() -> bool:
        return total["rounds"] < rounds and time.monotonic() - begun < seconds

    with tempfile.TemporaryDirectory(prefix="zcache-stress-") as parent:
        for n in range(rounds):
            if not goes_on():
                break
            with _folder(Path(parent), n) as folder:
                before = Counter[str]()
                for i in range(_ROUNDS_IN_A_FOLDER):
                    if not goes_on():
                        break
                    watch()
                    folder.round((i + 1) * _KEYS_IN_A_ROUND, rng, mend=i % 3 == 2)
                    total += folder.counts - before
                    before = folder.counts.copy()
            total.update(folder.board.sums())
    total["seconds"] = round(time.monotonic() - begun)
    return total


if __name__ == "__main__":
    # SIGTERM ends as an exception does: what was started is killed, what was written removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
