"""Processes that fill, read, give up and refill shared memory too small for them, killed at random moments.

`python -m tests.stress.memory ROUNDS SECONDS SEED` prints figures. Every read is compared with what the item is made
of. After a round in which nobody was killed, the ledger has to say what the files take; after others, once the next
process has joined alone.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tests.stress.board import Crew, report, until
from zcache import Cache
from zcache.storage.shm import SharedDirectory

_PROCESSES = 3
_N_KEYS = 40
_BUDGET_BYTES = 1_000_000  # a third of what all items take
_COUNTS = ("reads", "misses", "files written", "files given up", "left and joined")


def key(i: int) -> str:
    return f"{i:032x}"


def item(i: int) -> dict[str, np.ndarray]:
    """One array as it is, one with a table, one in a narrower type: which voxel of which item each is can be told."""
    n = 4000 + 500 * (i % 13)
    where = np.arange(n)
    return {
        "plain": where * np.float64(1.1) + i * 1_000_003.7,
        "table": ((where * 7 + i) % 200 / np.float32(211.0)).astype("f4"),
        "cast": (where + i * 101) % 30_011 - 9.0,
    }


def check(found: dict[str, np.ndarray], i: int, *, write: bool) -> None:
    for name, expected in item(i).items():
        assert found[name].dtype == expected.dtype
        assert found[name].tobytes() == expected.tobytes(), f"wrong {name} of item {i}"
        if write:
            found[name][...] = -1  # nobody else may see it


def work(base: Path, counts: np.ndarray, stop: np.ndarray, seed: int) -> None:
    """Use the memory until told to stop: a few items for a while, then a few others."""
    rng = random.Random(seed)
    budget = _BUDGET_BYTES // rng.choice([1, 1, 2])
    cache = Cache(None, memory=budget, memory_dir=base, copy_cache=rng.random() < 0.5, writers=1)
    cache._troubles.note = lambda *_: None  # that memory is full is what is wanted here
    held: list[tuple[int, dict[str, np.ndarray]]] = []
    while not stop[0]:
        first = rng.randrange(_N_KEYS)
        for _ in range(rng.randrange(20, 120)):
            i = (first + rng.randrange(12)) % _N_KEYS
            found = cache.get(key(i), None)
            counts[0] += 1
            if found is None:
                counts[1] += 1
                cache.put(key(i), item(i))
            else:
                held.append((i, found))
            if rng.random() < 0.02:
                cache._ram.forget(key(i))
            if len(held) > 5:
                check(held[0][1], held.pop(0)[0], write=rng.random() < 0.5)  # perhaps given up long since
        if rng.random() < 0.1:
            cache.close()
            counts[4] += 1
    cache.close()
    counts[2] += cache.stats.memory_filled
    counts[3] += cache.stats.memory_evicted


def drift(directory: SharedDirectory) -> int:
    """Return by how much the ledger is wrong."""
    return directory.used_bytes() - sum(one.nbytes for one in directory._scan())


def one_round(base: Path, rng: random.Random, n_kills: int) -> Counter[str]:
    shared = np.frombuffer(multiprocessing.RawArray("q", _PROCESSES * len(_COUNTS) + 1), np.int64)
    stop, counts = shared[:1], shared[1:].reshape(_PROCESSES, -1)
    directory = SharedDirectory(base, lambda _: _BUDGET_BYTES)
    crew = Crew()
    ends = []
    try:
        for slot in range(_PROCESSES):
            crew.start(functools.partial(work, base, counts[slot], stop, rng.getrandbits(32)))
        time.sleep(rng.uniform(0.3, 1.5))
        victims = crew.pids[:n_kills]
        for pid in victims:
            time.sleep(rng.expovariate(10))
            os.kill(pid, signal.SIGKILL)
        stop[0] = 1
        alive = crew.pids[n_kills:]
        until(lambda: all(_has_ended(pid) for pid in alive), "processes that were told to stop", 40)
    finally:
        ends = crew.finish()
    assert ends == [-signal.SIGKILL] * n_kills + [0] * (_PROCESSES - n_kills), f"a process failed: {ends}"
    if n_kills:
        directory.leave()
        assert not list(base.iterdir()), "left by the killed, although somebody was there to clear it up"
    else:
        assert drift(directory) == 0, f"the ledger is off by {drift(directory)} bytes"
        assert directory.used_bytes() <= _BUDGET_BYTES
        directory.leave()
    return Counter(dict(zip(_COUNTS, counts.sum(axis=0).tolist(), strict=True)))


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main(rounds: int, seconds: float, seed: int) -> Counter[str]:
    """Run; return the figures."""
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zcache-stress-") as folder:
        while total["rounds"] < rounds and time.monotonic() - begun < seconds:
            n_kills = total["rounds"] % _PROCESSES
            total += one_round(Path(folder), rng, n_kills)
            total.update({"rounds": 1, "kills": n_kills})
    total["seconds"] = round(time.monotonic() - begun)
    return total


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is killed, what was written removed
    report(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
