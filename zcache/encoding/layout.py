"""The JSON documents of a store: what an entry's ``zarr.json`` says, and how it is checked before it is believed.

An entry's document is a Zarr v3 group document with the metadata of its arrays consolidated inline. Its
``attributes.zcache`` holds the payload tree and, for each array, how its codes become values again and what its shard
must look like (size, seal, checksum of the index). Beside it, ``attributes.ome`` describes the images among the arrays
for viewers (see `zcache.encoding.ome`). The document's own CRC-32C stands at a fixed place near its start and covers
every other byte, so that a flipped bit in an affine is detected like one in a chunk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from zcache.encoding.array_layout import (
    ArrayRecord,
    array_json,
    array_metadata,
    array_parts,
    dump_document,
    parse_array,
)
from zcache.encoding.chunking import MAX_CHUNKS
from zcache.encoding.ome import LABELS, LEVEL
from zcache.encoding.payload import Json
from zcache.encoding.shard import crc32c
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = [
    "DOCUMENT",
    "FORMAT",
    "MAX_DOCUMENT_BYTES",
    "MAX_ITEM_BYTES",
    "EntryRecord",
    "check_document",
    "entry_document",
    "group_document",
    "parse_entry",
    "root_document",
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


def root_document() -> bytes:
    """Return the document of the store's root group."""
    return dump_document({"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": FORMAT}}})


def group_document(ome: Json) -> bytes:
    """Return the document of a group of labels."""
    return dump_document(_group_metadata(ome))


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
    arrays = {name: array_json(array) for name, array in record.arrays.items()}
    metadata = {path: _group_metadata(ome) for path, ome in record.label_groups.items()}
    metadata |= {_path(name, array): array_metadata(array) for name, array in record.arrays.items()}
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
    data = dump_document(document)
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
    arrays = {name: parse_array(name, described, metadata) for name, described in own["arrays"].items()}
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


def _excess(arrays: Mapping[str, ArrayRecord]) -> str:
    """Say what arrays have too much of; an empty string if nothing."""
    nbytes = sum(
        math.prod(a.grid.shard_shape) * max(a.dtype.itemsize, a.narrowing.dtype.itemsize) for a in arrays.values()
    )
    if nbytes > MAX_ITEM_BYTES:
        return f"arrays of {nbytes} bytes, {MAX_ITEM_BYTES} at most"
    n_chunks = sum(a.grid.n_chunks for a in arrays.values())
    return f"arrays of {n_chunks} chunks, {MAX_CHUNKS} at most" if n_chunks > MAX_CHUNKS else ""
