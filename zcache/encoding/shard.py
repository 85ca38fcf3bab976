"""Bytes of a shard: chunks through blosc and crc32c one after the other, then the index of their places.

Byte for byte what Zarr v3's ``sharding_indexed`` codec describes, with the codecs ``bytes``, ``blosc`` and ``crc32c``
inside and ``bytes``, ``crc32c`` for the index at the end (https://zarr-specs.readthedocs.io/en/latest/v3/codecs/).
Chunks whose bytes are all zero, the fill value's, are left out. Between the chunks and the index, where readers of Zarr
see a gap, stand the four bytes of the seal: the checksum of the chunks' checksums. With it an index of a few bytes
tells this shard from any other, even one whose chunks have the same lengths.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc

from zcache.encoding.chunking import ChunkGrid
from zcache.errors import CacheConfigError, EntryDamagedError

__all__ = [
    "CHUNK_OVERHEAD_BYTES",
    "SEAL_BYTES",
    "BloscCodec",
    "ShardIndex",
    "choose_shuffle",
    "crc32c",
    "decode_chunk",
    "frames",
]

# Blosc's own thread pool does not survive a fork, and numcodecs starts it when it is called from the main thread.
# One call then decodes one chunk on the calling thread; concurrency comes from chunks, not from inside of one.
blosc.use_threads = False

CHUNK_OVERHEAD_BYTES = 4
"""Bytes of the checksum after each encoded chunk."""

SEAL_BYTES = 4
"""Bytes between the last chunk and the index."""

_MISSING = 2**64 - 1
_BLOSC_VERSIONS = (2, 1)  # of the header, of the stream
# Flags; the upper three bits hold the format of the stream.
_SHUFFLED_BYTES, _COPIED, _SHUFFLED_BITS, _NOT_SPLIT = 1, 2, 4, 16
_FORMATS = {"blosclz": 0, "lz4": 1, "lz4hc": 1, "zlib": 3, "zstd": 4}
_CHECKSUM = struct.Struct("<I")
_BLOSC_HEADER = struct.Struct("<BBBBIII")  # version, codec version, flags, typesize, nbytes, blocksize, cbytes
_MIN_FRAME_BYTES = _BLOSC_HEADER.size + CHUNK_OVERHEAD_BYTES
_SHUFFLES = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}
_SHUFFLE_FLAGS = {"noshuffle": 0, "shuffle": _SHUFFLED_BYTES, "bitshuffle": _SHUFFLED_BITS}
_CODECS = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
_MAX_CLEVEL = 9
_TRIAL_CHUNKS = 4
_TRIAL_CANDIDATES = 16
# What a byte costs: read from storage at 150 MB/s, an NFS mount's rate, and decoded at the rates measured with LZ4 on
# medical volumes (5 to 7, 3 to 5.5 and 1.6 to 4 GB/s).
_STORAGE_BYTES_PER_S = 150e6
_DECODED_BYTES_PER_S = {"noshuffle": 6e9, "shuffle": 4.5e9, "bitshuffle": 2.5e9}


def crc32c(data: Any) -> int:
    """Return the CRC-32C (Castagnoli) of bytes or a contiguous array."""
    return int(google_crc32c.value(data))


@dataclass(frozen=True, slots=True)
class BloscCodec:
    """Compressor of a chunk.

    Attributes
    ----------
    cname : str
        ``"lz4"``, ``"lz4hc"``, ``"blosclz"``, ``"zstd"`` or ``"zlib"``.
    clevel : int
        0 (store) to 9.
    shuffle : str
        ``"noshuffle"``, ``"shuffle"`` (bytes) or ``"bitshuffle"``.
    """

    cname: str = "lz4"
    clevel: int = 5
    shuffle: str = "shuffle"

    def __post_init__(self) -> None:
        if self.cname not in _CODECS:
            raise CacheConfigError(f"codec={self.cname!r} is not known; choose one of {', '.join(_CODECS)}")
        if type(self.clevel) is not int or not 0 <= self.clevel <= _MAX_CLEVEL:
            raise CacheConfigError(f"clevel={self.clevel!r} is not an integer from 0 to {_MAX_CLEVEL}")
        if self.shuffle not in _SHUFFLES:
            raise CacheConfigError(f"shuffle={self.shuffle!r} is not known; choose one of {', '.join(_SHUFFLES)}")

    def compress(self, chunk: np.ndarray) -> bytes:
        """Compress one C-contiguous chunk; its item size is the blosc type size."""
        data: bytes = blosc.compress(chunk, self.cname.encode(), self.clevel, _SHUFFLES[self.shuffle])
        return data


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Where each chunk lies in a shard.

    Attributes
    ----------
    table : numpy.ndarray
        uint64 of shape (chunks, 2): offset and number of bytes, both 2⁶⁴−1 for a chunk that is left out.
    """

    table: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: list[int]) -> ShardIndex:
        """Build the index of chunks that follow each other from offset 0; length 0 means left out."""
        nbytes = np.array(lengths, np.uint64)
        ends = np.cumsum(nbytes, dtype=np.uint64)
        table = np.stack([ends - nbytes, nbytes], axis=1)
        table[nbytes == 0] = _MISSING
        return cls(table)

    @staticmethod
    def nbytes(n_chunks: int) -> int:
        """Bytes of the encoded index of `n_chunks` chunks, checksum included."""
        return 16 * n_chunks + CHUNK_OVERHEAD_BYTES

    @staticmethod
    def max_shard_nbytes(n_chunks: int, chunk_nbytes: int) -> int:
        """Bytes of the longest shard of `n_chunks` chunks: Blosc adds its header to what it cannot compress."""
        return n_chunks * (chunk_nbytes + _MIN_FRAME_BYTES) + SEAL_BYTES + ShardIndex.nbytes(n_chunks)

    def encode(self) -> bytes:
        """Return the index as it stands at the end of a shard."""
        body = self.table.astype("<u8").tobytes()
        return body + crc32c(body).to_bytes(CHUNK_OVERHEAD_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes, n_chunks: int, shard_nbytes: int) -> ShardIndex:
        """Read an index and check it against its checksum and the shard's size.

        Raises
        ------
        EntryDamagedError
            A wrong length, checksum, or a chunk that does not lie before the index.
        """
        if len(data) != cls.nbytes(n_chunks):
            raise EntryDamagedError(f"the shard index has {len(data)} bytes instead of {cls.nbytes(n_chunks)}")
        body, checksum = data[:-CHUNK_OVERHEAD_BYTES], data[-CHUNK_OVERHEAD_BYTES:]
        if crc32c(body).to_bytes(CHUNK_OVERHEAD_BYTES, "little") != checksum:
            raise EntryDamagedError("the shard index does not match its checksum")
        table = np.frombuffer(body, "<u8").reshape(n_chunks, 2)
        limit = shard_nbytes - len(data)
        present = table[(table != _MISSING).any(axis=1)]
        offsets, lengths = present[:, 0], present[:, 1]
        # Compared without a sum first: offset + length could wrap around.
        if (lengths > limit).any() or (offsets > limit).any() or (offsets + lengths > limit).any():
            raise EntryDamagedError("the shard index points beyond the shard")
        if (lengths < _MIN_FRAME_BYTES).any():
            raise EntryDamagedError("the shard index holds a chunk that is shorter than its header")
        return cls(table)

    def places(self) -> list[tuple[int, int] | None]:
        """Return (offset, bytes) of each chunk, None for one that is left out: all fill value."""
        return [None if nbytes == _MISSING else (offset, nbytes) for offset, nbytes in self.table.tolist()]


def frames(codes: np.ndarray, grid: ChunkGrid, codec: BloscCodec) -> Iterator[bytes]:
    """Yield each chunk of an array encoded, checksum included, in index order; empty for one that is all zero bytes."""
    for part in grid.parts():
        chunk = _padded(codes[part], grid.chunk_shape)
        if not _any_bit(chunk):
            yield b""
            continue
        data = codec.compress(chunk)
        yield data + crc32c(data).to_bytes(CHUNK_OVERHEAD_BYTES, "little")


def decode_chunk(frame: np.ndarray, out: np.ndarray, codec: BloscCodec | None = None) -> None:
    """Decode one encoded chunk after checking its checksum and its header.

    Parameters
    ----------
    frame : numpy.ndarray
        uint8: the encoded chunk with its checksum.
    out : numpy.ndarray
        C-contiguous array of the chunk's stored dtype and full shape; overwritten.
    codec : BloscCodec, optional
        What the chunk is said to be compressed with; if left out, any compressor will do.

    Raises
    ------
    EntryDamagedError
        The checksum or the header does not fit; nothing is decoded then. Or the stream cannot be decoded.
    """
    if frame.size < _MIN_FRAME_BYTES:
        raise EntryDamagedError("a chunk is shorter than its header")
    data = frame[:-CHUNK_OVERHEAD_BYTES]
    if (google_crc32c.value(data),) != _CHECKSUM.unpack_from(frame.data, data.size):
        raise EntryDamagedError("a chunk does not match its checksum")
    _check_header(data, out, codec)
    try:
        blosc.decompress(data, out)
    except (RuntimeError, ValueError) as e:
        raise EntryDamagedError(f"a chunk cannot be decompressed: {e}") from e


def _check_header(data: np.ndarray, out: np.ndarray, codec: BloscCodec | None) -> None:
    """Check everything that a Blosc header says, so that the decoder, written in C, sees no other."""
    version, stream_version, flags, typesize, nbytes, blocksize, cbytes = _BLOSC_HEADER.unpack_from(data.data)
    if nbytes != out.nbytes or cbytes != data.nbytes or typesize != out.itemsize:
        raise EntryDamagedError(f"a chunk's header says {nbytes} bytes of items of {typesize}, not {out.nbytes}")
    if (version, stream_version) != _BLOSC_VERSIONS or not 1 <= blocksize <= nbytes:
        raise EntryDamagedError(f"a chunk's header says Blosc {version}, {stream_version} with blocks of {blocksize}")
    if flags not in _possible_flags(codec):
        raise EntryDamagedError(f"a chunk's header says another compressor or shuffle: flags {flags:#x}")


@cache
def _possible_flags(codec: BloscCodec | None) -> frozenset[int]:
    """Return the flags that the header of a chunk may have; its level does not show there."""
    formats = _FORMATS.values() if codec is None else [_FORMATS[codec.cname]]
    shuffles = _SHUFFLE_FLAGS.values() if codec is None else [0, _SHUFFLE_FLAGS[codec.shuffle]]
    others = (0, _COPIED, _NOT_SPLIT, _COPIED | _NOT_SPLIT)
    return frozenset(f << 5 | s | o for f in formats for s in shuffles for o in others)


def choose_shuffle(codes: np.ndarray, grid: ChunkGrid, cname: str, clevel: int) -> str:
    """Compress a few chunks each way and return the shuffle with which they are read and decoded soonest.

    For items of one byte, byte shuffle does nothing and is not tried.
    """
    parts = list(grid.parts())
    step = -(-len(parts) // _TRIAL_CANDIDATES)
    trial: list[np.ndarray] = []
    # From the middle outwards: the borders of a volume are mostly air.
    for i in sorted(range(step // 2, len(parts), step), key=lambda i: abs(2 * i - len(parts))):
        chunk = _padded(codes[parts[i]], grid.chunk_shape)
        if _any_bit(chunk):
            trial.append(chunk)
        if len(trial) == _TRIAL_CHUNKS:
            break

    def seconds(shuffle: str) -> float:
        encoded = sum(len(BloscCodec(cname, clevel, shuffle).compress(chunk)) for chunk in trial)
        decoded = sum(chunk.nbytes for chunk in trial)
        return encoded / _STORAGE_BYTES_PER_S + decoded / _DECODED_BYTES_PER_S[shuffle]

    return min(("noshuffle", "bitshuffle") if codes.itemsize == 1 else _SHUFFLES, key=seconds)


def _padded(part: np.ndarray, chunk_shape: tuple[int, ...]) -> np.ndarray:
    """Return a C-contiguous chunk of full shape, zeros beyond the array's edge."""
    if part.shape == chunk_shape:
        return np.ascontiguousarray(part)
    chunk = np.zeros(chunk_shape, part.dtype)
    chunk[tuple(slice(n) for n in part.shape)] = part
    return chunk


def _any_bit(chunk: np.ndarray) -> bool:
    """Whether any bit of a contiguous array is set: by bits, since −0.0 equals 0.0 and NaN nothing."""
    flat = chunk.reshape(-1).view(np.uint8)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    return bool(words.any() or flat[words.nbytes :].any())
