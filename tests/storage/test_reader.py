"""Reading: any region equals zarr-python's reading of it, few system calls, and no damage ever decoded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import CORE, random_array
from tests.support import ct_like, in_fork, key, read, read_array, record_of, same_bits, shard_file, write
from zcache.encoding.narrowing import Precision, narrow
from zcache.encoding.restoring import restore
from zcache.encoding.shard import SEAL_BYTES, ShardIndex
from zcache.errors import EntryDamagedError
from zcache.storage import plan, reader
from zcache.storage.reader import Shard
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads
from zcache.storage.writer import WriteSettings

CODECS = ["lz4", "zstd", "lz4hc", "zlib", "blosclz"]
PRECISIONS = ["lossless", "lossless", 1e-3, "float16", "uint8", "uint16"]


@st.composite
def arrays(draw) -> np.ndarray:
    ndim = draw(st.integers(1, 5))
    shape = tuple(draw(st.integers(1, (60, 20, 10, 6, 4)[ndim - 1])) for _ in range(ndim))  # 1300 chunks at most
    dtype = np.dtype(draw(st.sampled_from(CORE)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    match draw(st.sampled_from(["bits", "few", "smooth", "sparse", "zeros", "constant"])):
        case "bits":
            return random_array(dtype.str, shape, int(rng.integers(2**32)))
        case "few":
            return (rng.integers(0, 9, shape) / 7).astype(dtype)
        case "smooth":
            return np.cumsum(rng.random(shape), axis=-1).astype(dtype)
        case "sparse":
            return ((rng.random(shape) < 0.02) * rng.random(shape) * 100).astype(dtype)
        case "zeros":
            return np.zeros(shape, dtype)
    return np.full(shape, 7.25).astype(dtype)


@st.composite
def regions(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((a, b) for a, b in ends)


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
@given(st.data())
def test_any_region_equals_what_zarr_reads(tmp_path, data):
    array = data.draw(arrays())
    chunks = data.draw(st.one_of(st.just("auto"), st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)))
    precision = Precision.parse(data.draw(st.sampled_from(PRECISIONS)))
    how = WriteSettings(data.draw(st.sampled_from(CODECS)), data.draw(st.integers(0, 9)), chunks, precision)
    store = Store(tmp_path)
    write(store, key(1), {"x": array}, how, replace=True)
    codes, narrowing = narrow(array, precision)
    expected = restore(codes, narrowing)
    if precision.kind == "lossless":
        assert same_bits(expected, array)
    stored = zarr.open_array(store.entry_path(key(1)) / "x", mode="r")
    for region in (None, data.draw(regions(array.shape)), data.draw(regions(array.shape))):
        box = tuple(slice(*r) for r in region) if region is not None else (...,)
        judged = np.ascontiguousarray(stored[box])
        assert same_bits(judged, np.ascontiguousarray(codes[box]))
        got = read(store, key(1), "x", region)
        assert same_bits(got, np.ascontiguousarray(expected[box]))
        assert same_bits(got, restore(judged, narrowing))
        assert got.flags.c_contiguous
        assert got.flags.writeable


@pytest.fixture
def preads(monkeypatch):
    """Every positional read as (offset, bytes)."""
    calls = []
    real = os.pread

    def counted(fd, n, offset):
        data = real(fd, n, offset)
        if not data.startswith(b'{"zarr_format"'):  # the entry's document
            calls.append((offset, n))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return calls


def test_a_contiguous_region_takes_few_reads(tmp_path, preads):
    store = Store(tmp_path)
    array = np.random.default_rng(0).integers(0, 2**16, (64, 64, 64), np.uint16)  # 8 KiB per chunk, incompressible
    write(store, key(1), {"x": array}, WriteSettings(chunks=(16, 16, 16)))
    size = record_of(store, key(1)).arrays["x"].shard_nbytes
    tail = (size - ShardIndex.nbytes(64) - SEAL_BYTES, ShardIndex.nbytes(64) + SEAL_BYTES)

    assert same_bits(read(store, key(1), "x"), array)
    assert preads[0] == tail
    assert len(preads) == 2
    assert sum(n for _, n in preads) == size
    preads.clear()

    assert same_bits(read(store, key(1), "x", ((16, 32), (0, 64), (0, 64))), array[16:32])
    assert len(preads) == 2
    preads.clear()

    assert same_bits(read(store, key(1), "x", ((20, 21), (20, 21), (20, 21))), array[20:21, 20:21, 20:21])
    assert len(preads) == 2
    assert preads[1][1] < 9000


def test_case_26_bytes_read_are_those_of_the_chunks_that_overlap(tmp_path, preads):
    store = Store(tmp_path)
    array = np.random.default_rng(0).integers(0, 2**16, (1, 256, 96, 96), np.uint16)
    write(store, key(1), {"x": array}, WriteSettings(chunks=(48, 48, 48)))
    record = record_of(store, key(1)).arrays["x"]
    region = ((0, 1), (100, 140), (10, 40), (50, 90))
    got = read(store, key(1), "x", region)
    assert same_bits(got, np.ascontiguousarray(array[:, 100:140, 10:40, 50:90]))
    assert len(record.grid.reads(region)) == 1
    assert sum(n for _, n in preads) <= ShardIndex.nbytes(record.grid.n_chunks) + 48**3 * 2 + 100


def test_chunks_left_out_are_not_read(tmp_path, preads):
    store = Store(tmp_path)
    write(store, key(1), {"x": np.zeros((8, 8, 8), "u1")}, WriteSettings(chunks=(4, 4, 4)))
    assert not read(store, key(1), "x").any()
    assert len(preads) == 1


def test_short_reads_are_continued_and_the_end_of_the_file_is_damage(tmp_path, monkeypatch):
    store = Store(tmp_path)
    array = ct_like()
    write(store, key(1), {"x": array})
    real = os.pread
    with monkeypatch.context() as m:
        m.setattr(os, "pread", lambda fd, n, offset: real(fd, min(n, 1000), offset))
        assert same_bits(read(store, key(1), "x"), array)
    with monkeypatch.context() as m:
        m.setattr(os, "pread", lambda fd, n, offset: real(fd, n, offset) if offset > 1000 else b"")
        with pytest.raises(EntryDamagedError, match="ends at byte"):
            read(store, key(1), "x")


@pytest.fixture
def entry(tmp_path):
    store = Store(tmp_path)
    array = random_array("u2", (4, 6, 5), 0)
    array[1] = 0
    write(store, key(1), {"x": array}, WriteSettings(chunks=(1, 6, 5)))
    return store, array, shard_file(store, key(1), "x", 3)


def test_case_05_every_changed_byte_of_a_shard_is_detected(entry):
    store, array, shard = entry
    record = record_of(store, key(1)).arrays["x"]
    data = shard.read_bytes()
    for i in range(len(data)):
        for mask in (0x01, 0xFF):
            broken = bytearray(data)
            broken[i] ^= mask
            shard.write_bytes(broken)
            with pytest.raises(EntryDamagedError):
                read_array(shard, record)
    shard.write_bytes(data)
    assert same_bits(read_array(shard, record), array)


def test_case_05_every_truncation_and_every_addition_to_a_shard_is_detected(entry):
    store, _, shard = entry
    record = record_of(store, key(1)).arrays["x"]
    data = shard.read_bytes()
    for broken in (*(data[:n] for n in range(len(data))), data + b"\0", b"\0" + data, b"\0" * len(data)):
        shard.write_bytes(broken)
        with pytest.raises(EntryDamagedError):
            read_array(shard, record)


def test_case_05_another_generation_of_a_shard_is_no_part_of_this_entry(tmp_path):
    store = Store(tmp_path)
    a, b = (random_array("u2", (40, 40), seed) for seed in (1, 2))
    write(store, key(1), {"x": a})
    write(store, key(2), {"x": b})
    records = [record_of(store, key(i)).arrays["x"] for i in (1, 2)]
    assert records[0].shard_nbytes == records[1].shard_nbytes  # incompressible: the size alone does not tell
    with pytest.raises(EntryDamagedError, match="published with"):
        read_array(shard_file(store, key(2), "x", 2), records[0])
    other = dataclasses.replace(records[0], shard_nbytes=records[0].shard_nbytes + 1)
    with pytest.raises(EntryDamagedError, match="bytes instead of"):
        read_array(shard_file(store, key(1), "x", 2), other)


def test_case_06_a_chunk_cut_out_of_the_index_is_no_fill_value(entry):
    store, _, shard = entry
    record = record_of(store, key(1)).arrays["x"]
    data = shard.read_bytes()
    n = ShardIndex.nbytes(4)
    table = ShardIndex.decode(data[-n:], 4, len(data)).table.copy()
    table[2] = 2**64 - 1  # the chunk's place says: left out, and the index's own checksum is right
    shard.write_bytes(data[:-n] + ShardIndex(table).encode())
    with pytest.raises(EntryDamagedError, match="published with"):
        read_array(shard, record)


def test_a_shard_that_is_missing_or_a_folder(entry):
    store, _, shard = entry
    record = record_of(store, key(1)).arrays["x"]
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        read_array(shard, record)
    shard.mkdir()
    with pytest.raises(EntryDamagedError):
        read_array(shard, record)


def test_files_are_closed_whatever_happens(entry):
    store, _, shard = entry
    record = record_of(store, key(1)).arrays["x"]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        read_array(shard, record)
    shard.write_bytes(b"\xff" * 30 + shard.read_bytes()[30:])
    for _ in range(3):
        with pytest.raises(EntryDamagedError):
            read_array(shard, record)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_read_is_shared_with_nobody(entry):
    store, array, _ = entry
    first = read(store, key(1), "x")
    first[...] = 7
    assert same_bits(read(store, key(1), "x"), array)


def test_the_fill_value_is_what_code_0_stands_for(tmp_path):
    store = Store(tmp_path)
    array = np.full((6, 40, 40), -1.5)
    array[0] = np.linspace(-1.5, 9, 1600).reshape(40, 40)
    array[4, 3, 3] = 2.25
    write(store, key(1), {"x": array}, WriteSettings(chunks=(1, 40, 40)))
    record = record_of(store, key(1)).arrays["x"]
    assert record.narrowing.kind == "table"
    assert same_bits(read(store, key(1), "x"), array)
    assert same_bits(read(store, key(1), "x", ((2, 5), (1, 9), (2, 7))), np.ascontiguousarray(array[2:5, 1:9, 2:7]))
    assert same_bits(read(store, key(1), "x", ((2, 4), (1, 9), (2, 7))), np.ascontiguousarray(array[2:4, 1:9, 2:7]))


def test_case_14_a_forked_child_reads_what_its_parent_has_read(entry):
    store, array, _ = entry
    assert same_bits(read(store, key(1), "x"), array)

    def child():
        assert same_bits(read(store, key(1), "x"), array)

    in_fork(child)


def test_large_ranges_are_split(tmp_path, preads):
    store = Store(tmp_path)
    array = np.random.default_rng(0).integers(0, 256, (12, 1024, 1024), np.uint8)
    write(store, key(1), {"x": array}, WriteSettings(clevel=0, chunks=(1, 256, 1024)))
    region = ((0, 12), (0, 1024), (0, 8))
    assert same_bits(read(store, key(1), "x", region), np.ascontiguousarray(array[:, :, :8]))
    assert max(n for _, n in preads) <= plan._MAX_RANGE_BYTES


@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
@given(st.data())
def test_small_slabs_threads_and_shared_boxes_give_what_one_slab_gives(tmp_path, data):
    array = data.draw(arrays())
    chunks = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple))
    how = WriteSettings(chunks=chunks, precision=Precision.parse(data.draw(st.sampled_from(PRECISIONS))))
    store = Store(tmp_path)
    write(store, key(1), {"x": array}, how, replace=True)
    record = record_of(store, key(1)).arrays["x"]
    path = shard_file(store, key(1), "x", array.ndim)
    boxes = [data.draw(regions(array.shape)) for _ in range(3)]
    expected = [read_array(path, record, box) for box in boxes]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(reader, "_SLAB_BYTES", data.draw(st.integers(1, 4000)))
        m.setattr("zcache.storage.threads.cpu_count", lambda: 3)
        shard = Shard(os.open(path, os.O_RDONLY), record, ReadThreads(data.draw(st.integers(1, 3))))
        for got in ([shard.read(box) for box in boxes], shard.read_boxes(boxes)):
            for a, b in zip(got, expected, strict=True):
                assert same_bits(a, b)
                assert a.flags.c_contiguous
                assert a.flags.writeable
        shard.close()
