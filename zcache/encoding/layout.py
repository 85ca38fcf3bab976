"""The JSON documents of a store: what an entry's ``zarr.json`` says, and how it is checked before it is believed.

An entry's document is a Zarr v3 group document with the metadata of its arrays consolidated inline. Its
``attributes.zcache`` holds the payload tree and, for each array, how its codes become values again and what its shard
must look like (size, seal, checksum of the index). Beside it, ``attributes.ome`` describes the images among the arrays
for viewers (see `zcache.encoding.ome`). The document's own CRC-32C stands at a fixed place near its start and covers
every other byte, so that a flipped bit in an affine is detected like one in a chunk.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zcache.encoding import narrowing as nw
from zcache.encoding.chunking import MAX_CHUNK_BYTES, MAX_CHUNKS, ChunkGrid
from zcache.encoding.names import is_array_name
from zcache.encoding.ome import LABELS, LEVEL
from zcache.encoding.payload import Json
from zcache.encoding.shard import SEAL_BYTES, BloscCodec, ShardIndex, crc32c
from zcache.encoding.storable import CORE_DTYPES, parse_dtype
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = [
    "DOCUMENT",
    "FORMAT",
    "MAX_DOCUMENT_BYTES",
    "MAX_ITEM_BYTES",
    "ArrayRecord",
    "EntryRecord",
    "array_document",
    "array_parts",
    "check_document",
    "entry_document",
    "group_document",
    "parse_entry",
    "root_document",
    "shard_path",
]

FORMAT = 1
"""Version of the on-disk format; part of every key."""

DOCUMENT = "zarr.json"
"""File name of a group's or an array's metadata."""

MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
"""No entry's document is longer; parsed and decoded it may take up to 64 times as much memory."""

MAX_ITEM_BYTES = 64 * 1024 * 1024 * 1024
"""The arrays of an entry, padded to whole chunks, take no more: chunks that are left out cost nothing on disk."""

_HEAD = b'{"zarr_format":3,"node_type":"group","attributes":{"zcache":{"crc32c":"'
_CRC_DIGITS = 8
_OWN = frozenset({"crc32c", "format", "payload", "arrays"})
_DTYPES = {np.dtype(s).name: np.dtype(s) for s in CORE_DTYPES}  # Zarr's names are numpy's
_MAX_AXES = 64  # numpy's limit
_AXES = re.compile(r"c?(?!.*(.).*\1)[xyz]{2,3}")  # of an image: all different


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRecord:
    """One stored array of an entry.

    Attributes
    ----------
    grid : ChunkGrid
        Shape and chunks.
    dtype : numpy.dtype
        Type of the stored codes, little-endian.
    codec : BloscCodec
        Compressor of the chunks.
    narrowing : Narrowing
        How codes become values again.
    shard_nbytes, seal, index_crc32c : int
        What the shard must look like: its size in bytes, and the checksums of its chunks' checksums and of its index.
    axes : str
        Names of the axes of an image, a letter each, such as ``"cxyz"``; empty for what is none.
    is_label : bool
        It lies among the OME labels of the entry: see `array_parts`.
    """

    grid: ChunkGrid
    dtype: np.dtype[Any]
    codec: BloscCodec
    narrowing: nw.Narrowing
    shard_nbytes: int
    seal: int
    index_crc32c: int
    axes: str = ""
    is_label: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EntryRecord:
    """Everything that an entry's document says.

    Attributes
    ----------
    tree : Json
        The payload tree (see `zcache.encoding.payload`).
    arrays : mapping of str to ArrayRecord
        The stored arrays by name, look-up tables included.
    about : Json
        For people: ``created`` (ISO 8601, UTC), ``source`` and ``pipeline``.
    ome : Json
        For viewers: the OME-Zarr metadata of the entry; None without images.
    label_groups : mapping of str to Json
        The OME-Zarr metadata of the groups that hold its labels, by their paths in the entry, outer ones first.
    """

    tree: Json
    arrays: Mapping[str, ArrayRecord]
    about: Json
    ome: Json = None
    label_groups: Mapping[str, Json] = field(default_factory=dict)


def array_parts(name: str, *, is_label: bool) -> tuple[str, ...]:
    """Return where an array lies in its entry: the names of the directories on the way.

    Examples
    --------
    >>> array_parts("image", is_label=False), array_parts("label", is_label=True)
    (('image',), ('labels', 'label', '0'))
    """
    return (LABELS, name, LEVEL) if is_label else (name,)


def shard_path(ndim: int) -> str:
    """Return the path of the one shard of an array of `ndim` axes, relative to the array.

    Examples
    --------
    >>> shard_path(4)
    'c/0/0/0/0'
    """
    return "/".join(["c", *["0"] * ndim])


def root_document() -> bytes:
    """Return the document of the store's root group."""
    return _dump({"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": FORMAT}}})


def array_document(record: ArrayRecord) -> bytes:
    """Return the document of one array, for readers that open arrays by themselves."""
    return _dump(_array_metadata(record))


def group_document(ome: Json) -> bytes:
    """Return the document of a group of labels."""
    return _dump(_group_metadata(ome))


def entry_document(record: EntryRecord) -> bytes:
    """Return the document of an entry, its checksum filled in.

    Raises
    ------
    UnstorableError
        It would say more than a reader believes.
    """
    excess = _excess(record.arrays)
    if excess:
        raise UnstorableError(f"the item has {excess}")
    arrays = {name: _array_json(array) for name, array in record.arrays.items()}
    metadata = {path: _group_metadata(ome) for path, ome in record.label_groups.items()}
    metadata |= {_path(name, array): _array_metadata(array) for name, array in record.arrays.items()}
    document = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "zcache": {
                "crc32c": "0" * _CRC_DIGITS,
                "format": FORMAT,
                **{k: v for k, v in record.about.items() if k not in _OWN},
                "payload": record.tree,
                "arrays": arrays,
            },
            **({} if record.ome is None else {"ome": record.ome}),
        },
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": metadata,
        },
    }
    data = _dump(document)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UnstorableError(
            f"the item takes {len(data)} bytes of JSON, {MAX_DOCUMENT_BYTES} at most: its long lists of numbers, "
            "strings or bytes had better be arrays"
        )
    tail = data[len(_HEAD) + _CRC_DIGITS :]
    return b"%s%08x%s" % (_HEAD, crc32c(tail), tail)


def parse_entry(data: bytes) -> EntryRecord:
    """Read an entry's document, checking all that it says.

    Raises
    ------
    EntryDamagedError
        Another format, a wrong checksum, contents that contradict themselves, or more than any entry may hold.
    """
    check_document(data)
    try:
        return _parse_document(json.loads(data))
    except EntryDamagedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as e:
        raise EntryDamagedError(f"its zarr.json is malformed: {type(e).__name__}: {e!s:.200}") from e


def check_document(data: bytes) -> int:
    """Check that a document is that of an entry and as it was written; return where what follows its checksum begins.

    Raises
    ------
    EntryDamagedError
        Another format, a wrong checksum, or too long.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise EntryDamagedError(f"its zarr.json has {len(data)} bytes, {MAX_DOCUMENT_BYTES} at most")
    digits, tail = data[len(_HEAD) : len(_HEAD) + _CRC_DIGITS], data[len(_HEAD) + _CRC_DIGITS :]
    if not data.startswith(_HEAD):
        raise EntryDamagedError(f"its zarr.json is not that of a zcache entry of format {FORMAT}")
    if digits != b"%08x" % crc32c(tail):
        raise EntryDamagedError("its zarr.json does not match its checksum")
    return len(_HEAD) + _CRC_DIGITS + 1  # the quote


def _parse_document(document: Json) -> EntryRecord:
    own = document["attributes"]["zcache"]
    if own["format"] != FORMAT:
        raise EntryDamagedError(f"it has format {own['format']!r:.100}; this zcache reads format {FORMAT}")
    metadata = document["consolidated_metadata"]["metadata"]
    arrays = {name: _parse_array(name, described, metadata) for name, described in own["arrays"].items()}
    ome = document["attributes"].get("ome")
    label_groups = {path: metadata[path]["attributes"]["ome"] for path in _label_groups(arrays)}
    _check_ome(arrays, ome, label_groups, metadata)
    excess = _excess(arrays)
    if excess:
        raise EntryDamagedError(f"it says that it has {excess}")
    about = {k: v for k, v in own.items() if k not in _OWN}
    return EntryRecord(own["payload"], arrays, about, ome, label_groups)


def _path(name: str, record: ArrayRecord) -> str:
    return "/".join(array_parts(name, is_label=record.is_label))


def _label_groups(arrays: Mapping[str, ArrayRecord]) -> list[str]:
    labels = [name for name, array in arrays.items() if array.is_label]
    return [LABELS, *(f"{LABELS}/{name}" for name in labels)] if labels else []


def _check_ome(
    arrays: Mapping[str, ArrayRecord], ome: Json, label_groups: Mapping[str, Json], metadata: Mapping[str, Json]
) -> None:
    """Check that what is said to viewers is about the arrays of the entry, and about nothing else."""
    paths = {_path(name, array) for name, array in arrays.items()}
    labels = {name: array for name, array in arrays.items() if array.is_label}
    if labels and any(path.lower() == LABELS for path in paths):
        raise EntryDamagedError(f"it has an array {LABELS!r} where its labels lie")
    if set(metadata) != paths | set(label_groups):
        raise EntryDamagedError("it describes other arrays to Zarr tools than its own")
    said = {} if ome is None else _said_axes(ome)
    if said != {name: array.axes for name, array in arrays.items() if array.axes and not array.is_label}:
        raise EntryDamagedError("it describes other images to viewers than its own")
    for path, group in label_groups.items():
        name = path.partition("/")[2]
        right = _said_axes(group) == {LEVEL: labels[name].axes} if name else group["labels"] == list(labels)
        if not right or metadata[path] != _group_metadata(group):
            raise EntryDamagedError(f"it describes its group {path!r} in a way that format {FORMAT} never does")


def _said_axes(ome: Json) -> dict[str, str]:
    """Return the names of the axes of each array that OME metadata describe."""
    return {
        level["path"]: "".join(axis["name"] for axis in image["axes"])
        for image in ome["multiscales"]
        for level in image["datasets"]
    }


def _group_metadata(ome: Json) -> Json:
    return {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}


def _array_metadata(record: ArrayRecord) -> Json:
    itemsize = record.dtype.itemsize
    ordered = {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    blosc = {
        "cname": record.codec.cname,
        "clevel": record.codec.clevel,
        "shuffle": record.codec.shuffle,
        "typesize": itemsize,
        "blocksize": 0,
    }
    fill: Json = {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(record.dtype.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(record.grid.shape),
        "data_type": record.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(record.grid.shard_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(record.grid.chunk_shape),
                    "codecs": [ordered, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}],
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ],
        "attributes": {},
        **({"dimension_names": list(record.axes)} if record.axes else {}),
    }


def _array_json(record: ArrayRecord) -> Json:
    described: dict[str, Json] = {
        "narrowing": nw.to_json(record.narrowing),
        "shard_nbytes": record.shard_nbytes,
        "seal": f"{record.seal:08x}",
        "index_crc32c": f"{record.index_crc32c:08x}",
    }
    if record.axes:
        described["axes"] = record.axes
    if record.is_label:
        described["is_label"] = True
    if record.narrowing.table is not None:
        table = record.narrowing.table
        raw = table.astype(table.dtype.newbyteorder("<"), copy=False).tobytes()
        described["table"] = base64.b64encode(raw).decode("ascii")
    return described


def _parse_array(name: str, described: Json, consolidated: Json) -> ArrayRecord:
    if not is_array_name(name):
        raise EntryDamagedError(f"it names an array {name!r:.100}")
    axes, is_label = described.get("axes", ""), described.get("is_label", False)
    if not (axes == "" or _AXES.fullmatch(axes)) or type(is_label) is not bool or (is_label and not axes):
        raise EntryDamagedError(f"it says of {name!r} that its axes are {axes!r:.20} and is_label is {is_label!r:.20}")
    metadata = consolidated["/".join(array_parts(name, is_label=is_label))]
    sharding = metadata["codecs"][0]["configuration"]
    blosc = sharding["codecs"][1]["configuration"]
    dtype = _DTYPES[metadata["data_type"]]
    grid = ChunkGrid(_extents(metadata["shape"]), _extents(sharding["chunk_shape"]))
    record = ArrayRecord(
        grid=grid,
        dtype=dtype,
        codec=BloscCodec(str(blosc["cname"]), int(blosc["clevel"]), str(blosc["shuffle"])),
        narrowing=nw.from_json(described["narrowing"], _parse_table(described)),
        shard_nbytes=int(described["shard_nbytes"]),
        seal=int(described["seal"], 16),
        index_crc32c=int(described["index_crc32c"], 16),
        axes=axes,
        is_label=is_label,
    )
    if axes and len(axes) != len(grid.shape):
        raise EntryDamagedError(f"it says that the axes of {name!r}, {len(grid.shape)} in number, are {axes!r}")
    # What the document says of an array must be what this format would say of it: one source of truth for all readers.
    if _array_metadata(record) != metadata:
        raise EntryDamagedError(f"it describes the array {name!r} in a way that format {FORMAT} never does")
    if record.narrowing.code_dtype != dtype:
        raise EntryDamagedError(f"it says that the codes of {name!r} are {dtype} and {record.narrowing.code_dtype}")
    n_chunks, chunk_nbytes = grid.n_chunks, math.prod(grid.chunk_shape) * dtype.itemsize
    if chunk_nbytes > MAX_CHUNK_BYTES:
        raise EntryDamagedError(f"it says that {name!r} has chunks of more than {MAX_CHUNK_BYTES} bytes")
    if ShardIndex.nbytes(n_chunks) + SEAL_BYTES > record.shard_nbytes:
        raise EntryDamagedError(f"the shard of {name!r} is said to be smaller than its index")
    if record.shard_nbytes > ShardIndex.max_shard_nbytes(n_chunks, chunk_nbytes):
        raise EntryDamagedError(f"the shard of {name!r} is said to be larger than its chunks could be")
    return record


def _excess(arrays: Mapping[str, ArrayRecord]) -> str:
    """Say what arrays have too much of; an empty string if nothing."""
    nbytes = sum(
        math.prod(a.grid.shard_shape) * max(a.dtype.itemsize, a.narrowing.dtype.itemsize) for a in arrays.values()
    )
    if nbytes > MAX_ITEM_BYTES:
        return f"arrays of {nbytes} bytes, {MAX_ITEM_BYTES} at most"
    n_chunks = sum(a.grid.n_chunks for a in arrays.values())
    return f"arrays of {n_chunks} chunks, {MAX_CHUNKS} at most" if n_chunks > MAX_CHUNKS else ""


def _parse_table(described: Json) -> np.ndarray | None:
    if "table" not in described:
        return None
    dtype = parse_dtype(str(described["narrowing"]["dtype"]))
    if dtype.str not in CORE_DTYPES:
        raise EntryDamagedError(f"it has a look-up table of {dtype}")
    return np.frombuffer(base64.b64decode(described["table"], validate=True), dtype)


def _extents(values: Json) -> tuple[int, ...]:
    extents = tuple(values)
    if not 1 <= len(extents) <= _MAX_AXES or not all(type(n) is int and n > 0 for n in extents):
        raise EntryDamagedError(f"it has an array of shape {values!r:.100}")
    return extents


def _dump(document: Json) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
