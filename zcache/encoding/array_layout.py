"""What is said of one array of an entry: its standard Zarr metadata, and beside it how its codes become values."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding import narrowing as nw
from zcache.encoding.chunking import MAX_CHUNK_BYTES, ChunkGrid
from zcache.encoding.names import is_array_name
from zcache.encoding.ome import LABELS, LEVEL
from zcache.encoding.payload import Json
from zcache.encoding.shard import SEAL_BYTES, BloscCodec, ShardIndex
from zcache.encoding.storable import CORE_DTYPES, parse_dtype
from zcache.errors import EntryDamagedError

__all__ = [
    "ArrayRecord",
    "array_document",
    "array_json",
    "array_metadata",
    "array_parts",
    "dump_document",
    "parse_array",
    "shard_path",
]

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


def array_document(record: ArrayRecord) -> bytes:
    """Return the document of one array, for readers that open arrays by themselves."""
    return dump_document(array_metadata(record))


def array_metadata(record: ArrayRecord) -> Json:
    """Return the standard Zarr v3 metadata of one array."""
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


def array_json(record: ArrayRecord) -> Json:
    """Return what an entry says of one array beside that."""
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


def parse_array(name: str, described: Json, consolidated: Json) -> ArrayRecord:
    """Read what an entry says of one array, trusting nothing.

    Parameters
    ----------
    name : str
        Of the array.
    described : Json
        What `array_json` returned.
    consolidated : Json
        The metadata of all arrays, by their paths.

    Raises
    ------
    EntryDamagedError
        It contradicts itself or is more than any array may be; the message says how.
    """
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
    if array_metadata(record) != metadata:
        raise EntryDamagedError(f"it describes the array {name!r} in a way that this format never does")
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


def dump_document(document: Json) -> bytes:
    """Return a document as it is stored: JSON without spaces, in ASCII."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
