"""Reading arrays of a published entry: positional reads, each chunk checked, decoded and restored into the output.

Plain synchronous code without state, safe in threads and after a fork. zarr-python reads the same files; it is the
oracle in the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zcache.encoding.chunking import ChunkRead, Region, whole_region
from zcache.encoding.layout import ArrayRecord
from zcache.encoding.narrowing import restore
from zcache.encoding.shard import CHUNK_OVERHEAD_BYTES, ShardIndex, decode_chunk
from zcache.errors import EntryDamagedError

__all__ = ["RangeRead", "coalesce", "read_array"]

_MAX_GAP_BYTES = 32 * 1024  # reading over a gap this long is cheaper than another system call
_MAX_RANGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One positional read that serves several chunks.

    Attributes
    ----------
    start, stop : int
        Half-open byte range in the shard.
    chunks : tuple of (ChunkRead, int, int)
        What to decode from it: the chunk, its offset in the shard, its bytes.
    """

    start: int
    stop: int
    chunks: tuple[tuple[ChunkRead, int, int], ...]


def coalesce(places: list[tuple[ChunkRead, int, int]]) -> Iterator[RangeRead]:
    """Group chunks that lie close together in the shard into common reads.

    Parameters
    ----------
    places : list of (ChunkRead, int, int)
        Chunk, offset and bytes, in any order.
    """
    group: list[tuple[ChunkRead, int, int]] = []
    start = stop = 0
    for place in sorted(places, key=lambda p: p[1]):
        _, offset, nbytes = place
        end = max(stop, offset + nbytes)
        if group and (offset - stop > _MAX_GAP_BYTES or end - start > _MAX_RANGE_BYTES):
            yield RangeRead(start, stop, tuple(group))
            group = []
        if not group:
            start, end = offset, offset + nbytes
        group.append(place)
        stop = end
    if group:
        yield RangeRead(start, stop, tuple(group))


def read_array(path: str, record: ArrayRecord, region: Region | None = None) -> np.ndarray:
    """Read a region of one array, bits restored.

    Parameters
    ----------
    path : str
        The array's shard.
    record : ArrayRecord
        What the entry's document says of the array; the shard is checked against it before anything is decoded.
    region : Region, optional
        Half-open (start, stop) per axis, inside the array; the whole array if left out.

    Returns
    -------
    numpy.ndarray
        C-contiguous, writable, of the narrowing's dtype; shared with nobody.

    Raises
    ------
    EntryDamagedError
        Size, index, a chunk's checksum or header do not fit.
    OSError
        The file cannot be read.
    """
    grid = record.grid
    reads = grid.reads(region if region is not None else whole_region(grid.shape))
    shape = tuple(stop - start for start, stop in region) if region is not None else grid.shape
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        index = _read_index(fd, record)
        places = []
        missing = []
        for read in reads:
            place = index.place(read.index)
            if place is None:
                missing.append(read)
            else:
                places.append((read, *place))
        out = _output(shape, record, missing, n_chunks=len(reads))
        scratch = np.empty(grid.chunk_shape, record.dtype)
        for range_read in coalesce(places):
            data = np.frombuffer(_pread(fd, range_read.start, range_read.stop), np.uint8)
            for read, offset, nbytes in range_read.chunks:
                first = offset - range_read.start
                decode_chunk(data[first : first + nbytes], scratch)
                restore(scratch[read.chunk_part], record.narrowing, out[read.out_part])
        return out
    finally:
        os.close(fd)


def _output(shape: tuple[int, ...], record: ArrayRecord, missing: list[ChunkRead], n_chunks: int) -> np.ndarray:
    """Allocate the output with the fill value where chunks were left out."""
    dtype = record.narrowing.dtype
    if not missing:
        return np.empty(shape, dtype)
    fill = restore(np.zeros((1,), record.dtype), record.narrowing)
    # Fresh zero pages cost nothing until they are touched: a label that is mostly background.
    if not fill.view(np.uint8).any() and 2 * len(missing) > n_chunks:
        return np.zeros(shape, dtype)
    out = np.empty(shape, dtype)
    for read in missing:
        out[read.out_part] = fill
    return out


def _read_index(fd: int, record: ArrayRecord) -> ShardIndex:
    """Read the index at the end of a shard, checked against the entry's document."""
    size = os.fstat(fd).st_size
    if size != record.shard_nbytes:
        raise EntryDamagedError(f"a shard has {size} bytes instead of {record.shard_nbytes}")
    n_chunks = record.grid.n_chunks
    data = _pread(fd, size - ShardIndex.nbytes(n_chunks), size)
    if int.from_bytes(data[-CHUNK_OVERHEAD_BYTES:], "little") != record.index_crc32c:
        raise EntryDamagedError("a shard's index is not the one that the entry was published with")
    return ShardIndex.decode(data, n_chunks, size)


def _pread(fd: int, start: int, stop: int) -> bytes:
    """Read exactly one byte range; a file that ends early is damage."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise EntryDamagedError(f"a shard ends at byte {start + len(data)}, before byte {stop}")
        data += more
    return data
