"""The stores that ``benchmarks.read`` compares: how each is written, opened and read.

Every peer returns the same thing: the float32 values of a box, in a C-contiguous array that belongs to the caller. What
a store has to do to get there is its own affair and part of the measured time. zarr-python and tensorstore read the
very files that zcache wrote and restore the values with zcache's own code, so that they differ in the reading alone.
The other stores hold what their users would put there: the values as they come, int16 for the CT in Hounsfield units
and float32 for the windowed one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import blosc2
import numpy as np
import tensorstore
import torch
import zarr
from mlarray import MLArray
from numpy.typing import NDArray

from benchmarks.arrays import Box
from benchmarks.limits import decoding_alone, memory_copy
from zcache import Cache
from zcache.encoding.array_layout import ArrayRecord, shard_path
from zcache.encoding.layout import DOCUMENT, parse_entry
from zcache.encoding.restoring import restore
from zcache.storage.reader import Shard

Values: TypeAlias = NDArray[np.float32]
Read: TypeAlias = Callable[[Box], Values]

KEY = "0" * 32
NAME = "image"

#: What nnU-Net derives from patches of 96³ voxels, for images larger than that: (chunks, blocks) by bytes per voxel.
#: Until version 2.6 blocks were to fit an L1 cache and chunks an old processor's share of L3; newer ones take larger.
NNUNET_ZSTD_LAYOUT = {4: ((1, 80, 64, 64), (1, 16, 16, 16)), 2: ((1, 160, 64, 64), (1, 32, 16, 16))}
NNUNET_LZ4HC_LAYOUT = {4: ((1, 96, 128, 128), (1, 32, 32, 32)), 2: ((1, 144, 144, 144), (1, 64, 32, 32))}
PATCH = 96


@dataclass(frozen=True)
class Form:
    """What is stored and read back.

    Attributes
    ----------
    key, title
        Its name in files and in headings.
    values
        What every peer must return: float32, channel first.
    plain
        The same values in the type in which a store without narrowing would be given them.
    """

    key: str
    title: str
    values: Values
    plain: NDArray[Any]


@dataclass(frozen=True)
class Peer:
    """One way to read the values.

    Attributes
    ----------
    label
        Its name in the tables.
    file
        The file or directory below the form's directory that it reads.
    opened
        ``opened(form, path)`` is a context in which the store is open; it gives the function that reads a box.
    write
        ``write(form, path)`` makes the file; None if another peer has made it.
    whole_only
        Whether a patch costs the whole volume.
    exact
        Whether it returns the values; the limit that only decodes does not.
    """

    label: str
    file: str
    opened: Callable[[Form, Path], AbstractContextManager[Read]]
    write: Callable[[Form, Path], None] | None = None
    whole_only: bool = False
    exact: bool = True

    def store(self, form: Form, folder: Path) -> None:
        """Write the peer's file below ``folder``, in place of an older one."""
        path = folder / self.file
        if self.write is None:
            return
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        self.write(form, path)

    def open(self, form: Form, folder: Path) -> AbstractContextManager[Read]:
        """Open the peer's file below ``folder``."""
        return self.opened(form, folder / self.file)


@dataclass(frozen=True)
class Blosc2Settings:
    """How a ``.b2nd`` file is written; Blosc2 chooses the layout itself where none is given.

    Attributes
    ----------
    codec, clevel
        The compressor.
    layouts
        Chunks and blocks by bytes per voxel.
    filters
        The shuffles to choose from by trial.
    """

    codec: blosc2.Codec
    clevel: int
    layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    filters: tuple[blosc2.Filter, ...] = (blosc2.Filter.SHUFFLE,)


def slices(box: Box) -> tuple[slice, ...]:
    """Return a box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return tuple((0, extent) for extent in shape)


def store_zcache(form: Form, path: Path) -> None:
    """Write an entry through the cache, with its defaults."""
    with Cache(path, on_error="raise") as cache:
        cache.put(KEY, {NAME: form.values})


def _entry(path: Path) -> Path:
    return path / "cache.zarr" / KEY


def _record(path: Path) -> ArrayRecord:
    return parse_entry((_entry(path) / DOCUMENT).read_bytes()).arrays[NAME]


@contextmanager
def open_zcache(form: Form, path: Path) -> Iterator[Read]:
    """Read through the cache: whole items with ``get``, boxes with ``get_region``."""
    everything = whole(form.values.shape)
    with Cache(path, read_only=True, on_error="raise") as cache:

        def read(box: Box) -> Any:
            return cache.get(KEY)[NAME] if box == everything else cache.get_region(KEY, NAME, box)

        yield read


@contextmanager
def open_shard(form: Form, path: Path) -> Iterator[Read]:
    """Read the entry's one file without the cache around it."""
    shard = Shard(os.open(_entry(path) / NAME / shard_path(form.values.ndim), os.O_RDONLY), _record(path))
    try:
        yield shard.read
    finally:
        shard.close()


@contextmanager
def open_zarr_python(_form: Form, path: Path) -> Iterator[Read]:
    """Read zcache's files with zarr-python, on one thread beside the one of its event loop."""
    narrowing = _record(path).narrowing
    with zarr.config.set({"async.concurrency": 1, "threading.max_workers": 1}):
        array: Any = zarr.open_array(_entry(path) / NAME, mode="r")
        yield lambda box: restore(array[slices(box)], narrowing)


@contextmanager
def open_tensorstore(_form: Form, path: Path) -> Iterator[Read]:
    """Read zcache's files with tensorstore, one thread for files and one for decoding."""
    narrowing = _record(path).narrowing
    one = {"limit": 1}
    context = tensorstore.Context({"data_copy_concurrency": one, "file_io_concurrency": one})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{_entry(path) / NAME}/"}}
    array = tensorstore.open(spec, context=context, read=True).result()
    yield lambda box: restore(array[slices(box)].read().result(), narrowing)


def store_blosc2(settings: Blosc2Settings, form: Form, path: Path) -> None:
    """Write a ``.b2nd`` file."""
    kept: dict[str, Any] = {}
    if settings.layouts:
        for name, extents in zip(("chunks", "blocks"), settings.layouts[form.plain.itemsize], strict=True):
            kept[name] = tuple(min(extent, n) for extent, n in zip(extents, form.plain.shape, strict=True))

    def parameters(shuffle: blosc2.Filter) -> dict[str, Any]:
        return {"codec": settings.codec, "clevel": settings.clevel, "filters": [shuffle], "nthreads": 1}

    def trial(shuffle: blosc2.Filter) -> int:
        return int(blosc2.asarray(middle, cparams=parameters(shuffle)).schunk.cbytes)

    # As nnU-Net does: on a piece from the middle, of the size of a patch.
    starts = [max(0, (n - PATCH) // 2) for n in form.plain.shape]
    middle = np.ascontiguousarray(form.plain[tuple(slice(start, start + PATCH) for start in starts)])
    shuffle = min(settings.filters, key=trial)
    blosc2.asarray(form.plain, urlpath=str(path), cparams=parameters(shuffle), **kept)


@contextmanager
def open_blosc2(_form: Form, path: Path) -> Iterator[Read]:
    """Read a ``.b2nd`` file through a memory map, as nnU-Net does."""
    array: Any = blosc2.open(str(path), mode="r", mmap_mode="r", dparams={"nthreads": 1})
    yield lambda box: array[slices(box)].astype(np.float32, copy=False)


def store_mlarray(form: Form, path: Path) -> None:
    """Write a ``.mla`` file laid out for the patch size; without the channel, which it would take for a dimension."""
    MLArray(form.plain[0], patch_size=PATCH).save(path)


@contextmanager
def open_mlarray(_form: Form, path: Path) -> Iterator[Read]:
    """Read a ``.mla`` file through a memory map."""
    array = MLArray.open(path)
    yield lambda box: array[slices(box[1:])].astype(np.float32, copy=False)[np.newaxis]
    array.close()


def store_npy(form: Form, path: Path) -> None:
    """Write a ``.npy`` file."""
    np.save(path, form.plain)


@contextmanager
def open_npy(_form: Form, path: Path) -> Iterator[Read]:
    """Copy out of a memory-mapped ``.npy`` file."""
    array = np.load(path, mmap_mode="r")
    yield lambda box: array[slices(box)].astype(np.float32, order="C")


def store_torch(form: Form, path: Path) -> None:
    """Write what MONAI's PersistentDataset writes: the float32 tensor."""
    torch.save(torch.from_numpy(form.values), path)


@contextmanager
def open_torch(form: Form, path: Path) -> Iterator[Read]:
    """Load the whole tensor each time, then cut the box out."""
    everything = whole(form.values.shape)

    def read(box: Box) -> Values:
        loaded: Values = torch.load(path).numpy()
        return loaded if box == everything else loaded[slices(box)].copy()

    yield read


@contextmanager
def open_memory(form: Form, _path: Path) -> Iterator[Read]:
    """Copy boxes of the values in memory: what any store has to do at the least."""
    yield lambda box: memory_copy(form.values, slices(box))


@contextmanager
def open_decoder(_form: Form, path: Path) -> Iterator[Read]:
    """Decode the chunks that a box touches and do nothing with them."""
    yield decoding_alone(_entry(path) / NAME)


def _b2nd(label: str, file: str, settings: Blosc2Settings) -> Peer:
    return Peer(label, file, open_blosc2, partial(store_blosc2, settings))


_TRIED = (blosc2.Filter.NOFILTER, blosc2.Filter.SHUFFLE)

ZCACHE = Peer("zcache", "zcache", open_zcache, store_zcache)
ZARR_PYTHON = Peer("zarr-python, same files", "zcache", open_zarr_python)
TENSORSTORE = Peer("tensorstore, same files", "zcache", open_tensorstore)
B2ND_LZ4 = _b2nd("b2nd, LZ4 5", "lz4.b2nd", Blosc2Settings(blosc2.Codec.LZ4, 5))
MEMCPY = Peer("limit: memcpy", "zcache", open_memory)
DECODING = Peer("limit: decoding alone", "zcache", open_decoder, exact=False)

PEERS = (
    ZCACHE,
    Peer("zcache, its Shard alone", "zcache", open_shard),
    ZARR_PYTHON,
    TENSORSTORE,
    B2ND_LZ4,
    _b2nd("b2nd, nnU-Net 2.6 (ZSTD 8)", "zstd.b2nd", Blosc2Settings(blosc2.Codec.ZSTD, 8, NNUNET_ZSTD_LAYOUT)),
    _b2nd(
        "b2nd, newer nnU-Net (LZ4HC 5)",
        "lz4hc.b2nd",
        Blosc2Settings(blosc2.Codec.LZ4HC, 5, NNUNET_LZ4HC_LAYOUT, _TRIED),
    ),
    Peer("mlarray, patch_size=96", "image.mla", open_mlarray, store_mlarray),
    Peer(".npy, memory-mapped", "image.npy", open_npy, store_npy),
    Peer("torch.load", "image.pt", open_torch, store_torch, whole_only=True),
    MEMCPY,
    DECODING,
)
