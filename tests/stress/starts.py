"""DataLoader starts, one after the other, in a process that has read and is writing: none may hang.

`python -m tests.stress.starts METHOD KIND STARTS SECONDS` prints figures. METHOD is fork, forkserver or spawn. KIND
says what the workers get: `monai`, a PersistentDataset with a label-guided crop; `torch`, a data set over
`zcache.Cache`, whose workers need no MONAI and so are there in half the time. Worker processes import this module: it
imports little.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.stress.board import report, until, watch
from tests.stress.items import MISS, check, item, warm_up
from tests.support import key
from zcache.cache import Cache

_WORKERS = 2
_ITEMS = 6
_BUSY = 4  # items that the parent's writers are at when workers start
_STARTS_IN_A_FOLDER = 10


class CacheItems:
    """A data set over a cache: each item is read back, or made and handed over, and checked."""

    def __init__(self, folder: Path, offset: int) -> None:
        self.cache = Cache(folder, on_error="raise")
        self.offset = offset

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> int:
        i = self.offset + index
        found = self.cache.get(key(i), MISS)
        check(self.cache.put(key(i), item(i)) if found is MISS else found, i)
        return i

    def prepare(self) -> None:
        """Read and write as a parent does before it has workers; leave the writers at work."""
        self[0]
        self.cache.flush()
        self[0]
        for i in range(_BUSY):
            at = self.offset + _ITEMS + i
            self.cache.put(key(at), item(at))

    def close(self) -> None:
        self.cache.close()
        assert not self.cache.stats.skipped
        assert not self.cache.stats.damaged


class Patches:
    """A PersistentDataset whose random part is a label-guided crop; each patch is checked."""

    def __init__(self, folder: Path, offset: int) -> None:
        from tests.stress import loaders  # noqa: PLC0415 - MONAI, which the workers of `CacheItems` do without

        self._check = loaders.check_samples
        self.offset = offset
        self.ds = loaders.data_set(folder, offset + _ITEMS + _BUSY)

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> int:
        self._check(self.ds[self.offset + index], self.offset + index)
        return self.offset + index

    def prepare(self) -> None:
        self[0]
        self.ds.flush()
        self[0]
        for i in range(_BUSY):
            self[_ITEMS + i]

    def close(self) -> None:
        self.ds.close()
        assert not self.ds.stats.skipped
        assert not self.ds.stats.damaged


def _begin(_worker: int) -> None:
    import torch  # noqa: PLC0415 - see above

    watch()
    torch.set_num_threads(1)


def _context(method: str, kind: str) -> Any:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__, "torch.utils.data", *(["tests.stress.loaders"] * (kind == "monai"))])
    return context


def start(data: CacheItems | Patches, context: Any, n: int) -> float:
    """Start workers and read one epoch, as the parent's writers work; return the seconds that it took."""
    from torch.utils.data import DataLoader  # noqa: PLC0415 - see above

    watch()  # anew for each start
    data.prepare()
    begun = time.perf_counter()
    loader: Any = DataLoader(
        data,
        batch_size=None,
        num_workers=_WORKERS,
        multiprocessing_context=context,
        worker_init_fn=_begin,
        persistent_workers=n % 2 == 1,
        timeout=45,
    )
    assert list(loader) == [data.offset + i for i in range(_ITEMS)]
    if n % 2:
        assert list(loader) == [data.offset + i for i in range(_ITEMS)]
    del loader
    return time.perf_counter() - begun


def _check_left(folder: Path, n_items: int) -> None:
    """See that workers, which ended well, wrote all that they were given and left nothing else."""
    until(lambda: len(list(Cache(folder).keys())) == n_items, "entries that workers were given")
    until(lambda: not list((folder / "staging").iterdir()), "the staging of workers that ended well")


def main(method: str, kind: str, starts: int, seconds: float) -> Counter[str]:
    """Run; return the figures."""
    import torch  # noqa: PLC0415 - see above

    torch.set_num_threads(1)
    warm_up()
    context = _context(method, kind)
    total: Counter[str] = Counter()
    begun, longest = time.monotonic(), 0.0
    while total["starts"] < starts and time.monotonic() - begun < seconds:
        with tempfile.TemporaryDirectory(prefix="zcache-stress-") as parent:
            for n in range(min(_STARTS_IN_A_FOLDER, starts - total["starts"])):
                data = (Patches if kind == "monai" else CacheItems)(Path(parent) / "cache", n * (_ITEMS + _BUSY))
                longest = max(longest, start(data, context, n))
                data.close()
                total["starts"] += 1
                total["workers"] += _WORKERS
                total["reads"] += 2 + _ITEMS * (1 + n % 2)
                if time.monotonic() - begun > seconds:
                    break
            _check_left(Path(parent) / "cache", (n + 1) * (_ITEMS + _BUSY))
    total["longest start in ms"] = round(1000 * longest)
    total["seconds"] = round(time.monotonic() - begun)
    return total


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
