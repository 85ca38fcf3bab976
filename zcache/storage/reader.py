"""Reading arrays of a published entry: positional reads, each chunk checked, decoded and restored into the output.

Plain synchronous code, safe in threads and after a fork. zarr-python reads the same files; it is the
oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zcache.encoding.array_layout import ArrayRecord
from zcache.encoding.chunking import ChunkRead, Region, whole_region
from zcache.encoding.narrowing import Narrowing
from zcache.encoding.restoring import restore
from zcache.encoding.rows import copy_rows
from zcache.encoding.shard import CHUNK_OVERHEAD_BYTES, SEAL_BYTES, ShardIndex, crc32c, decode_chunk
from zcache.errors import EntryDamagedError
from zcache.storage import files
from zcache.storage.plan import Place, Slab, coalesce, plan_slabs
from zcache.storage.threads import ReadThreads

__all__ = ["Shard"]

_SLAB_BYTES = 3 * 512 * 1024  # codes that stay in the processor's cache until they are restored in one go


class Shard:
    """One array of a published entry, opened for reading: its file, checked against the entry's document.

    Safe in threads: reads are positional. Keeps its file open until it is closed or dropped, so that what is read is
    whole and of one generation, whatever happens to the entry meanwhile.

    Parameters
    ----------
    fd : int
        The file, opened; closed with the shard.
    record : ArrayRecord
        What the entry's document says of the array.
    threads : ReadThreads, optional
        Decode chunks side by side.

    Raises
    ------
    EntryDamagedError
        Size or index do not fit.
    OSError
        The file cannot be read.
    """

    def __init__(self, fd: int, record: ArrayRecord, threads: ReadThreads | None = None) -> None:
        self.record = record
        self._threads = threads or ReadThreads()
        self._fd = fd
        try:
            self._places = _read_index(self._fd, record).places()
        except BaseException:
            self.close()
            raise

    def read(self, region: Region | None = None, *, restored: bool = True) -> np.ndarray:
        """Read a region, bits restored.

        Parameters
        ----------
        region : Region, optional
            Half-open (start, stop) per axis, inside the array; the whole array if left out.
        restored : bool
            Return values; if false, codes.

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
        region = whole_region(grid.shape) if region is None else region
        slabs = plan_slabs(grid, region, _SLAB_BYTES // record.dtype.itemsize)
        shape = tuple(stop - start for start, stop in region)
        narrowing = record.narrowing if restored else Narrowing("identity", record.dtype, record.dtype)
        out, rest = self._output(shape, slabs, narrowing)
        if rest:
            self._threads.run(lambda some: self._read_slabs(some, out, narrowing), rest)
        return out

    def read_boxes(self, regions: Sequence[Region]) -> list[np.ndarray]:
        """Read several regions, decoding each chunk that they share once; otherwise as `read` of each."""
        if len(regions) == 1:
            return [self.read(regions[0])]
        record, grid = self.record, self.record.grid
        codes = [np.empty([stop - start for start, stop in region], record.dtype) for region in regions]
        wanted: dict[int, list[tuple[np.ndarray, ChunkRead]]] = {}
        for box, region in zip(codes, regions, strict=True):
            for read in (read for slab in plan_slabs(grid, region, box.size) for read in slab.reads):
                if self._places[read.chunk] is None:
                    box[read.out_part] = 0
                else:
                    wanted.setdefault(read.chunk, []).append((box, read))

        def read_chunks(some: Sequence[Place]) -> None:
            scratch = np.empty(grid.chunk_shape, record.dtype)
            for first, frame in _frames(self._fd, some):
                decode_chunk(frame, scratch, record.codec)
                for box, read in wanted[first.chunk]:
                    copy_rows(scratch[read.chunk_part], box[read.out_part])

        self._threads.run(read_chunks, self._stored([parts[0][1] for parts in wanted.values()]))
        return codes if record.narrowing.kind == "identity" else [restore(box, record.narrowing) for box in codes]

    def check(self) -> None:
        """Read and decode every chunk, keeping none.

        Raises
        ------
        EntryDamagedError
            A chunk's checksum or header does not fit, or the chunks are not those that the entry was published with.
        OSError
            The file cannot be read.
        """
        record, grid = self.record, self.record.grid
        checksums: dict[int, bytes] = {}

        def check_chunks(some: Sequence[Place]) -> None:
            scratch = np.empty(grid.chunk_shape, record.dtype)
            for read, frame in _frames(self._fd, some):
                decode_chunk(frame, scratch, record.codec)
                checksums[read.chunk] = frame[-CHUNK_OVERHEAD_BYTES:].tobytes()

        self._threads.run(check_chunks, self._stored(grid.reads(whole_region(grid.shape))))
        if crc32c(b"".join(checksums[chunk] for chunk in sorted(checksums))) != record.seal:
            raise EntryDamagedError("the chunks of a shard are not those that the entry was published with")

    def _stored(self, reads: Iterable[ChunkRead]) -> list[Place]:
        """Return where the chunks lie that were not left out."""
        found = ((read, self._places[read.chunk]) for read in reads)
        return [Place(read, *place) for read, place in found if place is not None]

    def _output(self, shape: tuple[int, ...], slabs: list[Slab], narrowing: Narrowing) -> tuple[np.ndarray, list[Slab]]:
        """Allocate the output; return it with the slabs that are not all fill value, which it holds already."""
        filled = [all(self._places[read.chunk] is None for read in slab.reads) for slab in slabs]
        rest = [slab for slab, fill in zip(slabs, filled, strict=True) if not fill]
        if len(rest) == len(slabs):
            return np.empty(shape, narrowing.dtype), rest
        fill = restore(np.zeros((1,), self.record.dtype), narrowing)
        if not fill.view(np.uint8).any():
            return np.zeros(shape, narrowing.dtype), rest  # fresh zero pages cost nothing until they are touched
        out = np.empty(shape, narrowing.dtype)
        for slab, is_fill in zip(slabs, filled, strict=True):
            if is_fill:
                out[slab.out_part] = fill
        return out, rest

    def _read_slabs(self, slabs: Sequence[Slab], out: np.ndarray, narrowing: Narrowing) -> None:
        """Read, decode and restore slabs into their parts of the output."""
        record = self.record
        # Codes as wide as the values are values: no second step then.
        direct = narrowing.kind == "identity"
        scratch = np.empty(record.grid.chunk_shape, record.dtype)
        buffer = np.empty(0 if direct else max(out[slab.out_part].size for slab in slabs), record.dtype)
        for slab in slabs:
            target = out[slab.out_part]
            codes = target if direct else buffer[: target.size].reshape(target.shape)
            for read in slab.reads:
                if self._places[read.chunk] is None:
                    codes[read.out_part] = 0
            for read, frame in _frames(self._fd, self._stored(slab.reads)):
                decode_chunk(frame, scratch, record.codec)
                copy_rows(scratch[read.chunk_part], codes[read.out_part])
            if not direct:
                restore(codes, narrowing, target)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            files.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _frames(fd: int, places: Sequence[Place]) -> Iterator[tuple[ChunkRead, np.ndarray]]:
    """Read chunks, neighbours together; yield each with its encoded bytes, in the order of the file."""
    for range_read in coalesce(places):
        data = np.frombuffer(files.read_exactly(fd, range_read.start, range_read.stop), np.uint8)
        for read, offset, nbytes in range_read.places:
            first = offset - range_read.start
            yield read, data[first : first + nbytes]


def _read_index(fd: int, record: ArrayRecord) -> ShardIndex:
    """Read the index at the end of a shard, checked against the entry's document."""
    size = files.file_size(fd)
    if size != record.shard_nbytes:
        raise EntryDamagedError(f"a shard has {size} bytes instead of {record.shard_nbytes}")
    n_chunks = record.grid.n_chunks
    tail = files.read_exactly(fd, size - ShardIndex.nbytes(n_chunks) - SEAL_BYTES, size)
    seal, index = tail[:SEAL_BYTES], tail[SEAL_BYTES:]
    found = int.from_bytes(seal, "little"), int.from_bytes(index[-CHUNK_OVERHEAD_BYTES:], "little")
    if found != (record.seal, record.index_crc32c):
        raise EntryDamagedError("a shard is not the one that the entry was published with")
    return ShardIndex.decode(index, n_chunks, size)
