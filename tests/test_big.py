"""Arrays beyond 2 and 4 GiB, built sparse: where 32-bit sizes would wrap around."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import zarr

from tests.support import key, leaves_of, read, record_of
from zcache.cache import Cache
from zcache.encoding.shard import ShardIndex
from zcache.storage.store import Store
from zcache.storage.writer import WriteSettings, write_entry

pytestmark = pytest.mark.big

GIB = 2**30


@pytest.fixture(autouse=True)
def enough_memory():
    with open("/proc/meminfo", "rb") as f:  # noqa: PTH123
        available = next(int(line.split()[1]) for line in f if line.startswith(b"MemAvailable"))
    if available < 12 * 2**20:
        pytest.skip("less than 12 GiB of memory are free")
    yield
    gc.collect()


def scattered(shape, dtype, n, make):
    """Zeros, whose pages cost nothing, with a few values all over, one at either end."""
    array = np.zeros(shape, dtype)
    flat = array.reshape(-1)
    rng = np.random.default_rng(0)
    at = np.unique(np.concatenate([[0, flat.size - 1], rng.integers(0, flat.size, n)]))
    flat[at] = make(np.arange(1, at.size + 1))
    return array, at, flat[at].copy()


def box_around(index, shape, half=40):
    return tuple((max(0, i - half), min(n, i + half + 1)) for i, n in zip(index, shape, strict=True))


def assert_boxes(store, name, array, places):
    for i in places:
        region = box_around(np.unravel_index(i, array.shape), array.shape)
        got = read(store, key(1), name, region)
        expected = array[tuple(slice(*r) for r in region)]
        assert got.dtype == array.dtype
        assert np.array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"))
        assert got.any()


def test_case_13_an_item_of_bytes_above_2_gib(tmp_path):
    shape = (1, 1300, 1300, 1300)
    array, at, values = scattered(shape, np.uint8, 60, lambda i: i % 255 + 1)
    assert array.nbytes > 2**31
    with Cache(tmp_path) as cache:
        returned = cache.put(key(1), {"x": array})
        assert np.array_equal(returned["x"].reshape(-1)[at], values)
        del returned
        cache.flush()
        stats = cache.stats
        assert (stats.stored, stats.raw_bytes) == (1, array.nbytes)
        assert stats.stored_bytes < 2**22
        back = cache.get(key(1))["x"]
    assert back.shape == shape
    assert np.array_equal(back.reshape(-1)[at], values)
    assert np.count_nonzero(back) == at.size
    del back
    store = Store(tmp_path)
    record = record_of(store, key(1)).arrays["x"]
    assert np.prod(record.grid.chunk_shape) <= 512 * 1024
    assert record.shard_nbytes > ShardIndex.nbytes(record.grid.n_chunks) + 20 * at.size // 2
    assert_boxes(store, "x", array, at[[0, 1, 20, 40, -2, -1]])
    stored = zarr.open_group(store.entry_path(key(1)), mode="r")["x"]
    for i in at[[0, 30, -1]]:
        index = np.unravel_index(i, shape)
        assert stored[tuple(slice(n, n + 1) for n in index)].item() == array[index]


def test_case_13_an_array_of_floats_above_4_gib(tmp_path):
    shape = (1, 1050, 1050, 1050)
    array, at, values = scattered(shape, np.float32, 60, lambda i: -i / 7)
    array.reshape(-1)[at[5]] = values[5] = np.nan
    array.reshape(-1)[at[6]] = values[6] = -0.0
    assert array.nbytes > 4 * GIB
    store = Store(tmp_path)
    write_entry(store, key(1), leaves_of({"x": array}), WriteSettings(), {})
    record = record_of(store, key(1)).arrays["x"]
    assert record.narrowing.kind == "table"
    assert_boxes(store, "x", array, at[[0, 1, 5, 20, 40, -2, -1]])
    index = np.unravel_index(at[6], shape)
    one = read(store, key(1), "x", tuple((n, n + 1) for n in index))
    assert np.signbit(one).item()
    del array
    slab = read(store, key(1), "x", ((0, 1), (1000, 1050), (0, 1050), (0, 1050)))
    last = at[at >= 1000 * 1050 * 1050]
    assert np.array_equal(slab.reshape(-1)[last - 1000 * 1050 * 1050], values[-last.size :])
    assert np.count_nonzero(slab) == last.size
    store.close()
