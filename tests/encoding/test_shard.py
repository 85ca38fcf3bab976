"""Shards: every chunk and the index checked to the last bit before anything is decoded."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from tests.strategies import CORE, random_array
from tests.support import ct_like, same_bits
from zcache.encoding import shard as sh
from zcache.encoding.chunking import ChunkGrid
from zcache.encoding.shard import BloscCodec, ShardIndex, choose_shuffle, crc32c, decode_chunk, frames
from zcache.errors import CacheConfigError, EntryDamagedError

CODECS = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
MISSING = 2**64 - 1
HEADER = struct.Struct("<BBBBIII")  # version, codec version, flags, typesize, nbytes, blocksize, cbytes


def sealed(data: bytes) -> np.ndarray:
    """A frame whose checksum is right, whatever it holds."""
    return np.frombuffer(data + crc32c(data).to_bytes(4, "little"), np.uint8)


def frame_of(chunk: np.ndarray, codec: BloscCodec | None = None) -> np.ndarray:
    (frame,) = frames(chunk, ChunkGrid(chunk.shape, chunk.shape), codec or BloscCodec())
    return np.frombuffer(frame, np.uint8)


def test_crc32c_is_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize("dtype", CORE)
@pytest.mark.parametrize("cname", CODECS)
def test_case_27_chunks_come_back_and_their_typesize_is_the_item_size(dtype, cname):
    array = random_array(dtype, (3, 5, 7), 1)
    array[0, 0, 0] = 1
    for shuffle in SHUFFLES:
        frame = frame_of(array, BloscCodec(cname, 5, shuffle))
        _, _, flags, typesize, nbytes, _, cbytes = HEADER.unpack(frame[:16].tobytes())
        assert (typesize, nbytes, cbytes) == (array.itemsize, array.nbytes, frame.size - 4)
        out = np.empty_like(array)
        decode_chunk(frame, out)
        assert same_bits(out, array)
        if not flags & 2:  # not stored as it is: the shuffle that was asked for (blosc has none for single bytes)
            assert bool(flags & 4) == (shuffle == "bitshuffle")
            assert bool(flags & 1) == (shuffle == "shuffle" and array.itemsize > 1)


def test_case_27_byte_shuffle_works_on_whole_items():
    ramp = np.arange(4000, dtype="<u4")
    shuffled, plain = (frame_of(ramp, BloscCodec("lz4", 5, s)).size for s in ("shuffle", "noshuffle"))
    assert shuffled < 0.4 * plain


@pytest.mark.parametrize("dtype", CORE)
def test_chunks_at_the_edge_are_padded_with_zeros(dtype):
    array = random_array(dtype, (5, 7), 2)
    grid = ChunkGrid((5, 7), (3, 4))
    padded = np.zeros((6, 8), dtype)
    padded[:5, :7] = array
    out = np.empty((3, 4), dtype)
    for frame, cell in zip(frames(array, grid, BloscCodec()), np.ndindex(grid.counts), strict=True):
        decode_chunk(np.frombuffer(frame, np.uint8), out)
        i, j = cell[0] * 3, cell[1] * 4
        assert same_bits(out, np.ascontiguousarray(padded[i : i + 3, j : j + 4]))


@pytest.mark.parametrize(("dtype", "n"), [("f4", 8), ("f2", 3), ("f8", 1), ("c8", 5), ("c16", 3)])
def test_case_12_chunks_of_negative_zeros_are_stored_and_of_zeros_left_out(dtype, n):
    zeros = np.zeros(n, dtype)
    grid = ChunkGrid((n,), (n,))
    assert list(frames(zeros, grid, BloscCodec())) == [b""]
    for i in range(n):
        one = zeros.copy()
        one.view(f"f{one.real.itemsize}")[-1 if one.dtype.kind == "c" else i] = -0.0
        (frame,) = frames(one, grid, BloscCodec())
        out = np.empty_like(one)
        decode_chunk(np.frombuffer(frame, np.uint8), out)
        assert same_bits(out, one)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 17])
def test_one_bit_anywhere_makes_a_chunk_worth_storing(n):
    for i in range(n):
        for value in (1, 128):
            chunk = np.zeros(n, np.uint8)
            chunk[i] = value
            assert list(frames(chunk, ChunkGrid((n,), (n,)), BloscCodec())) != [b""]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_flipped_byte_of_a_chunk_is_detected(shuffle):
    chunk = ct_like((6, 7, 5))
    frame = frame_of(chunk, BloscCodec("lz4", 5, shuffle))
    out = np.empty_like(chunk)
    for i in range(frame.size):
        for mask in (0x01, 0xFF):
            broken = frame.copy()
            broken[i] ^= mask
            out[...] = 42
            with pytest.raises(EntryDamagedError):
                decode_chunk(broken, out)
            assert (out == 42).all()
    decode_chunk(frame, out)
    assert same_bits(out, chunk)


def test_every_truncation_of_a_chunk_is_detected():
    chunk = ct_like((6, 7, 5))
    frame = frame_of(chunk)
    for n in range(frame.size):
        with pytest.raises(EntryDamagedError):
            decode_chunk(frame[:n], np.empty_like(chunk))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbytes", 0),
        ("nbytes", 419),
        ("nbytes", 421),
        ("nbytes", 2**31),
        ("nbytes", 2**32 - 1),
        ("cbytes", 0),
        ("cbytes", 16),
        ("cbytes", 2**31 - 1),
        ("cbytes", 2**32 - 1),
        ("typesize", 0),
        ("typesize", 1),
        ("typesize", 4),
        ("typesize", 255),
    ],
)
def test_a_chunk_whose_header_lies_is_refused_before_it_is_decoded(field, value, monkeypatch):
    monkeypatch.setattr(blosc, "decompress", lambda *_: pytest.fail("decoded"))
    chunk = ct_like((6, 7, 5))
    names = ("version", "codec", "flags", "typesize", "nbytes", "blocksize", "cbytes")
    data = frame_of(chunk)[:-4].tobytes()
    header = dict(zip(names, HEADER.unpack(data[:16]), strict=True))
    assert header["nbytes"] == 420
    header[field] = value
    with pytest.raises(EntryDamagedError, match="header says"):
        decode_chunk(sealed(HEADER.pack(*header.values()) + data[16:]), np.empty_like(chunk))


@given(st.binary(max_size=60), st.booleans())
def test_nonsense_with_a_valid_checksum_is_damage_and_nothing_else(body, plausible):
    out = np.zeros((4, 8), np.uint16)
    data = HEADER.pack(2, 1, 1, 2, 64, 64, 16 + len(body)) + body if plausible else body
    try:
        decode_chunk(sealed(data), out)
    except EntryDamagedError:
        return
    assert plausible  # what happens to be a valid stream may decode


@given(st.lists(st.sampled_from([0, 20, 21, 500, 2**33]), min_size=1, max_size=40))
def test_the_index_comes_back(lengths):
    index = ShardIndex.from_lengths(lengths)
    data = index.encode()
    size = sum(lengths) + len(data)
    assert len(data) == ShardIndex.nbytes(len(lengths))
    back = ShardIndex.decode(data, len(lengths), size)
    np.testing.assert_array_equal(back.table, index.table)
    offset = 0
    for i, n in enumerate(lengths):
        assert back.places()[i] == ((offset, n) if n else None)
        offset += n


def test_the_index_is_what_the_zarr_specification_says():
    body = np.array([[0, 20], [MISSING, MISSING], [20, 33]], "<u8").tobytes()
    assert ShardIndex.from_lengths([20, 0, 33]).encode() == body + crc32c(body).to_bytes(4, "little")


def test_every_flipped_byte_of_the_index_is_detected():
    data = ShardIndex.from_lengths([100, 0, 40]).encode()
    for i in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            broken = bytearray(data)
            broken[i] ^= mask
            with pytest.raises(EntryDamagedError, match="checksum"):
                ShardIndex.decode(bytes(broken), 3, 140 + len(data))


def test_an_index_of_another_length_is_detected():
    data = ShardIndex.from_lengths([100, 0, 40]).encode()
    for n in (0, 3, 4, 16, len(data) - 1):
        with pytest.raises(EntryDamagedError, match="bytes instead of"):
            ShardIndex.decode(data[:n], 3, 140 + n)
    with pytest.raises(EntryDamagedError, match="bytes instead of"):
        ShardIndex.decode(data, 4, 140 + len(data))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((0, 101), "beyond"),
        ((1, 100), "beyond"),
        ((101, 20), "beyond"),
        ((2**63, 20), "beyond"),
        ((MISSING - 10, 20), "beyond"),
        ((0, 2**63), "beyond"),
        ((2**63, 2**63), "beyond"),
        ((MISSING, 20), "beyond"),
        ((0, MISSING), "beyond"),
        ((0, 0), "shorter"),
        ((0, 19), "shorter"),
        ((100, 0), "shorter"),
    ],
)
def test_an_index_that_lies_is_damage_even_with_a_valid_checksum(place, says):
    index = ShardIndex(np.array([[0, 100], place], np.uint64)).encode()
    with pytest.raises(EntryDamagedError, match=says):
        ShardIndex.decode(index, 2, 100 + len(index))


def test_a_place_may_reach_up_to_the_index():
    index = ShardIndex(np.array([[80, 20], [0, 100]], np.uint64)).encode()
    assert ShardIndex.decode(index, 2, 100 + len(index)).places()[0] == (80, 20)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gzip",), "codec='gzip'.*lz4, lz4hc, blosclz, zstd, zlib"),
        (("",), "codec=''"),
        (("lz4", 10), "clevel=10"),
        (("lz4", -1), "clevel=-1"),
        (("lz4", True), "clevel=True"),
        (("lz4", 5.0), "clevel=5.0"),
        (("lz4", 5, "auto"), "shuffle='auto'.*noshuffle, shuffle, bitshuffle"),
    ],
)
def test_a_compressor_that_cannot_work_is_refused(arguments, says):
    with pytest.raises(CacheConfigError, match=says):
        BloscCodec(*arguments)


def sizes_by_shuffle(codes, grid, cname="lz4"):
    return {s: sum(map(len, frames(codes, grid, BloscCodec(cname, 5, s)))) for s in SHUFFLES}


def test_the_shuffle_is_chosen_by_trial():
    rng = np.random.default_rng(0)
    shape, chunks = (64, 64, 16), (16, 64, 16)
    grid = ChunkGrid(shape, chunks)
    # One byte of four is noise, the others are constant.
    noisy = (rng.integers(0, 256, shape) + 0x12345600).astype(np.uint32)
    # Whole words repeat, at distances that have nothing in common: LZ finds them as they are.
    words = rng.integers(0, 2**63, 64, dtype=np.int64)[rng.integers(0, 64, shape)]
    few_bits = rng.integers(0, 2, shape).astype(np.uint8)
    for codes, expected in ((noisy, "shuffle"), (words, "noshuffle"), (few_bits, "bitshuffle")):
        chosen = choose_shuffle(codes, grid, "lz4", 5)
        sizes = sizes_by_shuffle(codes, grid)
        assert chosen == expected, sizes
        assert sizes[chosen] <= 1.1 * min(sizes.values())


def test_a_shuffle_is_chosen_for_arrays_of_nothing_but_zeros_too():
    assert choose_shuffle(np.zeros((8, 8), "f4"), ChunkGrid((8, 8), (4, 4)), "lz4", 5) in SHUFFLES
    assert choose_shuffle(np.zeros((8, 8), "u1"), ChunkGrid((8, 8), (4, 4)), "lz4", 5) != "shuffle"


def test_the_trial_looks_at_chunks_that_hold_something():
    # Only one chunk of ten holds anything; what is chosen must suit that one.
    for filled in range(10):
        codes = np.zeros((10, 4096), np.uint8)
        codes[filled] = np.random.default_rng(0).integers(0, 2, 4096)
        assert choose_shuffle(codes, ChunkGrid(codes.shape, (1, 4096)), "lz4", 5) == "bitshuffle"


def test_decoding_starts_no_threads_of_blosc():
    assert sh.blosc.use_threads is False
