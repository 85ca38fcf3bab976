"""Writing one entry: narrow, choose chunks and shuffle, stream the shards into staging, publish by one rename."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zcache.encoding.array_layout import ArrayRecord, array_document, array_parts, shard_path
from zcache.encoding.chunking import ChunkGrid, ChunkSpec, choose_chunk_shape
from zcache.encoding.layout import DOCUMENT, EntryRecord, entry_document, group_document
from zcache.encoding.narrowing import LOSSLESS, Narrowing, Precision, narrow
from zcache.encoding.ome import Image, entry_metadata, find_images, is_label, label_groups
from zcache.encoding.payload import ArrayLeaf, EncodedItem, Json
from zcache.encoding.shard import (
    CHUNK_OVERHEAD_BYTES,
    SEAL_BYTES,
    BloscCodec,
    ShardIndex,
    choose_shuffle,
    crc32c,
    frames,
)
from zcache.storage import files
from zcache.storage.store import Store

__all__ = ["WriteSettings", "Written", "write_child", "write_entry"]


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """How entries are encoded.

    Attributes
    ----------
    cname, clevel : str, int
        Blosc compressor and level.
    chunks : ChunkSpec
        ``"auto"`` or extents along the trailing axes.
    precision : Precision
        Lossless, or the error that non-integral floats may have.
    patch : tuple of int
        Extents along the trailing axes of the patches that will mostly be read, if that is known.
    durable : bool
        Have an entry on the disk before it is published.
    """

    cname: str = "lz4"
    clevel: int = 5
    chunks: ChunkSpec = "auto"
    precision: Precision = LOSSLESS
    patch: tuple[int, ...] = ()
    durable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What came of writing an entry.

    Attributes
    ----------
    published : bool
        False if another process had published the same entry first.
    raw_bytes, stored_bytes : int
        Size of the arrays in memory; size of all files of the entry.
    records : dict of str to ArrayRecord
        How each array was stored.
    """

    published: bool
    raw_bytes: int
    stored_bytes: int
    records: dict[str, ArrayRecord]


def write_entry(
    store: Store,
    key: str,
    item: EncodedItem,
    settings: WriteSettings,
    about: Json,
    *,
    narrowings: Mapping[str, Narrowing] = MappingProxyType({}),
    replace: bool = False,
) -> Written:
    """Write and publish one entry.

    Parameters
    ----------
    store : Store
        Where.
    key : str
        Name of the entry.
    item : EncodedItem
        A snapshot: nobody else changes its arrays.
    settings : WriteSettings
        How.
    about : Json
        ``source`` and ``pipeline``, for people who look at the entry later.
    narrowings : mapping of str to Narrowing
        Arrays of `item` that are codes already, by name, with the way back.
    replace : bool
        Take the place of an entry that is damaged.

    Raises
    ------
    OSError
        The file system refuses a step; nothing is published then and nothing stays in staging.
    """
    images = find_images(item.tree, {leaf.name: leaf.array.shape for leaf in item.leaves})
    with store.staged() as staged:
        records, stored_bytes = _write_group(staged, item, settings, about, narrowings, images)
        published = store.publish(staged, key, replace=replace, durable=settings.durable)
    raw_bytes = sum(math.prod(r.grid.shape) * r.narrowing.dtype.itemsize for r in records.values())
    return Written(published, raw_bytes, stored_bytes, records)


def write_child(
    store: Store, key: str, child: str, item: EncodedItem, settings: WriteSettings, about: Json
) -> tuple[bool, int]:
    """Write a group and add it to a published entry.

    Parameters
    ----------
    store, key : Store, str
        Which entry.
    child : str
        Name of the group.
    item, settings, about
        As of `write_entry`.

    Returns
    -------
    published : bool
        False if the entry has such a group already, or is gone.
    stored_bytes : int
        Size of all files of the group.

    Raises
    ------
    OSError
        The file system refuses a step; nothing is added then and nothing stays in staging.
    """
    with store.staged() as staged:
        _, stored_bytes = _write_group(staged, item, settings, about, {}, {})
        return store.publish_child(staged, key, child, durable=settings.durable), stored_bytes


def _write_group(
    directory: Path,
    item: EncodedItem,
    settings: WriteSettings,
    about: Json,
    narrowings: Mapping[str, Narrowing],
    images: Mapping[str, Image],
) -> tuple[dict[str, ArrayRecord], int]:
    """Write the files of an entry; return how its arrays were stored, and the bytes of all files."""
    records: dict[str, ArrayRecord] = {}
    documents: dict[Path, bytes] = {}
    for leaf in item.leaves:
        place, record = _write_array(directory, leaf, narrowings.get(leaf.name), settings, images.get(leaf.name))
        records[leaf.name] = record
        documents[place] = array_document(record)
    shown = [image for image in images.values() if not records[image.name].is_label]
    groups = label_groups(images[name] for name, record in records.items() if record.is_label)
    documents |= {directory / path: group_document(ome) for path, ome in groups.items()}
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    about = {"created": created, **about}
    documents[directory] = entry_document(EntryRecord(item.tree, records, about, entry_metadata(shown), groups))
    stored_bytes = sum(record.shard_nbytes for record in records.values())
    for place, document in documents.items():
        stored_bytes += files.write_file(place / DOCUMENT, document, durable=settings.durable)
    if settings.durable:
        _sync_directories(directory, records)
    return records, stored_bytes


def _sync_directories(directory: Path, records: Mapping[str, ArrayRecord]) -> None:
    """Have the names of an entry's files on the disk, innermost first."""
    inside = {directory}
    for name, record in records.items():
        inner = directory.joinpath(
            *array_parts(name, is_label=record.is_label), shard_path(len(record.grid.shape))
        ).parent
        while inner != directory:
            inside.add(inner)
            inner = inner.parent
    for place in sorted(inside, key=lambda path: len(path.parts), reverse=True):
        files.sync_directory(place)


def _write_array(
    directory: Path, leaf: ArrayLeaf, narrowing: Narrowing | None, settings: WriteSettings, image: Image | None
) -> tuple[Path, ArrayRecord]:
    """Write the shard of an array; return where the array lies and how it was stored."""
    codes, narrowing = (leaf.array, narrowing) if narrowing is not None else narrow(leaf.array, settings.precision)
    chunk_shape = choose_chunk_shape(codes.shape, codes.itemsize, settings.chunks, patch=settings.patch)
    grid = ChunkGrid(codes.shape, chunk_shape)
    shuffle = choose_shuffle(codes, grid, settings.cname, settings.clevel)
    codec = BloscCodec(settings.cname, settings.clevel, shuffle)
    among_labels = image is not None and is_label(image, narrowing)
    place = directory.joinpath(*array_parts(leaf.name, is_label=among_labels))
    path = place / shard_path(codes.ndim)
    files.make_directory(path.parent, parents=True)
    lengths: list[int] = []
    checksums = bytearray()
    with files.FileWriter(path, durable=settings.durable) as f:
        for frame in frames(codes, grid, codec):
            f.write(frame)
            lengths.append(len(frame))
            checksums += frame[-CHUNK_OVERHEAD_BYTES:]
        seal = crc32c(bytes(checksums))
        index = ShardIndex.from_lengths(lengths).encode()
        f.write(seal.to_bytes(SEAL_BYTES, "little") + index)
    record = ArrayRecord(
        grid=grid,
        dtype=codes.dtype.newbyteorder("<"),
        codec=codec,
        narrowing=narrowing,
        shard_nbytes=sum(lengths) + SEAL_BYTES + len(index),
        seal=seal,
        index_crc32c=int.from_bytes(index[-CHUNK_OVERHEAD_BYTES:], "little"),
        axes="" if image is None else image.axes,
        is_label=among_labels,
    )
    return place, record
