"""Reading arrays of a published entry: positional reads, each chunk checked, decoded and restored into the output.

Plain synchronous code, safe in threads and after a fork. zarr-python reads the same files; it is the
oracle in the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zcache.encoding.chunking import ChunkRead, Region, whole_region
from zcache.encoding.layout import ArrayRecord
from zcache.encoding.narrowing import restore
from zcache.encoding.shard import CHUNK_OVERHEAD_BYTES, SEAL_BYTES, ShardIndex, decode_chunk
from zcache.errors import EntryDamagedError

__all__ = ["Band", "RangeRead", "Shard", "coalesce", "plan_bands", "read_array"]

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


@dataclass(frozen=True, slots=True)
class Band:
    """Chunks whose part of the output is contiguous in memory: a slab along one axis.

    Attributes
    ----------
    out_part : tuple of slice
        The slab: leading axes of the output, all of the axes that follow.
    places : tuple of (ChunkRead, int, int)
        Chunks with their offset in the shard and their bytes.
    missing : tuple of ChunkRead
        Chunks that were left out of the shard: fill value.
    """

    out_part: tuple[slice, ...]
    places: tuple[tuple[ChunkRead, int, int], ...]
    missing: tuple[ChunkRead, ...]


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


class Shard:
    """One array of a published entry, opened for reading: its file, checked against the entry's document.

    Safe in threads: reads are positional. Keeps its file open until it is closed or dropped, so that what is read is
    whole and of one generation, whatever happens to the entry meanwhile.

    Parameters
    ----------
    path : str
        The file.
    record : ArrayRecord
        What the entry's document says of the array.

    Raises
    ------
    EntryDamagedError
        Size or index do not fit.
    OSError
        The file cannot be read.
    """

    def __init__(self, path: str, record: ArrayRecord) -> None:
        self.record = record
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._index = _read_index(self._fd, record)
        except BaseException:
            self.close()
            raise

    def read(self, region: Region | None = None) -> np.ndarray:
        """Read a region, bits restored.

        Parameters
        ----------
        region : Region, optional
            Half-open (start, stop) per axis, inside the array; the whole array if left out.

        Returns
        -------
        numpy.ndarray
            C-contiguous, writable, of the narrowing's dtype; shared with nobody.

        Raises
        ------
        EntryDamagedError
            A chunk's checksum or header does not fit.
        OSError
            The file cannot be read.
        """
        record, grid = self.record, self.record.grid
        shape = tuple(stop - start for start, stop in region) if region is not None else grid.shape
        bands = plan_bands(grid.reads(region if region is not None else whole_region(grid.shape)), self._index)
        out = _output(shape, record, bands)
        scratch = np.empty(grid.chunk_shape, record.dtype)
        for band in bands:
            if band.places:
                _read_band(self._fd, band, record, scratch, out[band.out_part])
        return out

    def read_boxes(self, regions: Sequence[Region]) -> list[np.ndarray]:
        """Read several regions, decoding each chunk that they share once; otherwise as `read` of each."""
        record, grid = self.record, self.record.grid
        codes = [np.empty([stop - start for start, stop in region], record.dtype) for region in regions]
        wanted: dict[int, list[tuple[np.ndarray, ChunkRead]]] = {}
        for box, region in zip(codes, regions, strict=True):
            for read in grid.reads(region):
                wanted.setdefault(read.index, []).append((box, read))
        places = []
        for chunk, parts in wanted.items():
            place = self._index.place(chunk)
            if place is None:
                for box, read in parts:
                    box[read.out_part] = 0
            else:
                places.append((parts[0][1], *place))
        scratch = np.empty(grid.chunk_shape, record.dtype)
        for first, frame in _frames(self._fd, places):
            decode_chunk(frame, scratch)
            for box, read in wanted[first.index]:
                box[read.out_part] = scratch[read.chunk_part]
        return codes if record.narrowing.kind == "identity" else [restore(box, record.narrowing) for box in codes]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def read_array(path: str, record: ArrayRecord, region: Region | None = None) -> np.ndarray:
    """Open an array, read a region of it and close it; see `Shard`."""
    shard = Shard(path, record)
    try:
        return shard.read(region)
    finally:
        shard.close()


def plan_bands(reads: list[ChunkRead], index: ShardIndex) -> list[Band]:
    """Group chunks so that each group's part of the output is contiguous in memory.

    Parameters
    ----------
    reads : list of ChunkRead
        From `ChunkGrid.reads`.
    index : ShardIndex
        Where the chunks lie.
    """
    groups: dict[tuple[tuple[int, int], ...], list[ChunkRead]] = {}
    for read in reads:
        extents = [(part.start, part.stop) for part in read.out_part]
        # Up to the first axis along which the chunk has any extent: before it, each index is a group of its own.
        depth = next((i for i, (a, b) in enumerate(extents) if b - a > 1), len(extents) - 1)
        groups.setdefault(tuple(extents[: depth + 1]), []).append(read)
    bands = []
    for lead, members in groups.items():
        found = [(read, index.place(read.index)) for read in members]
        places = tuple((read, *place) for read, place in found if place is not None)
        missing = tuple(read for read, place in found if place is None)
        bands.append(Band(tuple(slice(a, b) for a, b in lead), places, missing))
    return bands


def _read_band(fd: int, band: Band, record: ArrayRecord, scratch: np.ndarray, out: np.ndarray) -> None:
    """Read, decode and restore the chunks of one band into its part of the output."""
    depth = len(band.out_part) - 1
    # Codes as wide as the values are values: no second step then.
    direct = record.narrowing.kind == "identity"
    codes = out if direct else np.empty(out.shape, record.dtype)
    for read in band.missing:
        codes[_within(read, depth)] = 0
    for read, frame in _frames(fd, list(band.places)):
        decode_chunk(frame, scratch)
        codes[_within(read, depth)] = scratch[read.chunk_part]
    if not direct:
        # One pass over contiguous codes: twice as fast as restoring chunk by chunk into short rows of the output.
        restore(codes, record.narrowing, out)


def _frames(fd: int, places: list[tuple[ChunkRead, int, int]]) -> Iterator[tuple[ChunkRead, np.ndarray]]:
    """Read chunks, neighbours together; yield each with its encoded bytes, in the order of the file."""
    for range_read in coalesce(places):
        data = np.frombuffer(_pread(fd, range_read.start, range_read.stop), np.uint8)
        for read, offset, nbytes in range_read.chunks:
            first = offset - range_read.start
            yield read, data[first : first + nbytes]


def _within(read: ChunkRead, depth: int) -> tuple[slice, ...]:
    """Return the chunk's place within its band, which has its own origin along the first axes."""
    own = read.out_part
    return (*(slice(0, part.stop - part.start) for part in own[: depth + 1]), *own[depth + 1 :])


def _output(shape: tuple[int, ...], record: ArrayRecord, bands: list[Band]) -> np.ndarray:
    """Allocate the output, with the fill value in the bands that hold nothing else."""
    dtype = record.narrowing.dtype
    empty = [band for band in bands if not band.places]
    if not empty:
        return np.empty(shape, dtype)
    fill = restore(np.zeros((1,), record.dtype), record.narrowing)
    if not fill.view(np.uint8).any():
        return np.zeros(shape, dtype)  # fresh zero pages cost nothing until they are touched
    out = np.empty(shape, dtype)
    for band in empty:
        out[band.out_part] = fill
    return out


def _read_index(fd: int, record: ArrayRecord) -> ShardIndex:
    """Read the index at the end of a shard, checked against the entry's document."""
    size = os.fstat(fd).st_size
    if size != record.shard_nbytes:
        raise EntryDamagedError(f"a shard has {size} bytes instead of {record.shard_nbytes}")
    n_chunks = record.grid.n_chunks
    tail = _pread(fd, size - ShardIndex.nbytes(n_chunks) - SEAL_BYTES, size)
    seal, index = tail[:SEAL_BYTES], tail[SEAL_BYTES:]
    found = int.from_bytes(seal, "little"), int.from_bytes(index[-CHUNK_OVERHEAD_BYTES:], "little")
    if found != (record.seal, record.index_crc32c):
        raise EntryDamagedError("a shard is not the one that the entry was published with")
    return ShardIndex.decode(index, n_chunks, size)


def _pread(fd: int, start: int, stop: int) -> bytes:
    """Read exactly one byte range; a file that ends early is damage."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise EntryDamagedError(f"a shard ends at byte {start + len(data)}, before byte {stop}")
        data += more
    return data
