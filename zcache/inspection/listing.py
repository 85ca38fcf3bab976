"""What one entry is, as a list of thousands shows it: read from the beginning and the end of its document.

Most of a document is the payload: metadata and traces, which a list does not show. It is skipped unparsed, which makes
listing several times faster. That is sound because the document's own checksum is verified first.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from zcache.encoding.array_layout import array_parts
from zcache.encoding.layout import DOCUMENT, FORMAT, check_document, parse_entry
from zcache.encoding.names import is_array_name
from zcache.encoding.payload import Json
from zcache.errors import EntryDamagedError
from zcache.inspection.pipelines import Pipeline, Pipelines
from zcache.inspection.stale import Stamp, read_stamps
from zcache.storage import files
from zcache.storage.store import Store

__all__ = ["INDEX_PREFIX", "ArrayInfo", "EntryInfo", "IndexInfo", "Status", "format_of", "survey"]

Status = Literal["ok", "damaged", "unknown format", "unreadable", "gone"]
"""``"gone"``: removed since the directory was listed; ``"unreadable"``: no permission, or the disk fails."""

INDEX_PREFIX = "voxels-"
"""What the names of indexes of voxels begin with."""

# Something else bears the name of the entry, such as a file or a link.
_NO_ENTRY = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
_DECODER = json.JSONDecoder()
_OME = '},"ome":'
_END = '},"consolidated_metadata":{"kind":"inline","must_understand":false,"metadata":'
_ARRAYS = ',"arrays":{'
# The place of an array in the payload: the dtype of the item is there, which for strings and bfloat16 is not numpy's.
_REFERENCE = re.compile(
    r'\{"dtype":"([^"]{1,40})","shape":\[([0-9,]{0,400})\],"array":"([^"]{1,130})"\}(?:,"dtype":"([a-z0-9_]{1,30})")?'
)
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of an entry.

    Attributes
    ----------
    name : str
        Its name in the store.
    path : str
        Where it lies in the entry: ``labels/label/0`` of a label over an image, else its name.
    shape : tuple of int
        As in the item.
    dtype, stored_dtype : str
        In the item, and of what is stored.
    chunk_shape : tuple of int
        Extents of a chunk.
    codec : str
        Compressor, level and shuffle.
    narrowing : str
        How stored codes become values: ``"identity"``, ``"cast"``, ``"table"`` or ``"affine"``.
    max_abs_error : float
        0.0 if nothing was lost.
    raw_bytes, stored_bytes : int
        In memory, and on disk.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    stored_dtype: str
    chunk_shape: tuple[int, ...]
    codec: str
    narrowing: str
    max_abs_error: float
    raw_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """How many times smaller it is on disk."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else math.nan


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """A set of voxels that crops choose from, kept beside the arrays.

    Attributes
    ----------
    name : str
        Name of its group.
    about : Json
        What it was worked out from.
    stored_bytes : int
        Of all its files.
    problem : str
        Why it cannot be used; empty if it can.
    """

    name: str
    about: Json
    stored_bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry.

    Attributes
    ----------
    key : str
        Name of the entry.
    status : str
        ``"ok"``, ``"damaged"``, ``"unknown format"``, ``"unreadable"`` or ``"gone"``.
    problem : str
        The reason in words; empty if all is well.
    created : datetime or None
        When it was written.
    source : tuple of str
        The files that the item names.
    stamps : tuple of Stamp
        What these were when it was written; empty if it does not say.
    pipeline : Pipeline or None
        The transforms that made it; None if it was put without.
    arrays : tuple of ArrayInfo
        The arrays of more than 4 KiB; smaller ones are part of the document.
    indexes : tuple of IndexInfo
        Indexes of voxels.
    document_bytes : int
        Of all the JSON files of the entry itself.
    """

    key: str
    status: Status = "ok"
    problem: str = ""
    created: dt.datetime | None = None
    source: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    pipeline: Pipeline | None = None
    arrays: tuple[ArrayInfo, ...] = ()
    indexes: tuple[IndexInfo, ...] = ()
    document_bytes: int = 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of the arrays in memory."""
        return sum(array.raw_bytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files, indexes of voxels included."""
        own = sum(array.stored_bytes for array in self.arrays)
        return self.document_bytes + own + sum(index.stored_bytes for index in self.indexes)

    @property
    def ratio(self) -> float:
        """How many times smaller the entry is on disk; NaN if nothing is known of it."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else math.nan


def survey(store: Store, key: str, pipelines: Pipelines) -> EntryInfo:
    """Look at one entry. Never fails: what is wrong with it is part of the answer.

    Parameters
    ----------
    store : Store
        Where.
    key : str
        Name of the entry.
    pipelines : Pipelines
        Those of the cache; a new one is added.
    """
    data = b""
    try:
        data = store.read_document(key)
        info = _read(key, data, pipelines)
        return _with_indexes(store, info)
    except FileNotFoundError:
        return _without_document(store, key)
    except EntryDamagedError as e:
        version = format_of(data)
        if version is None:
            return EntryInfo(key, "damaged", str(e))
        return EntryInfo(key, "unknown format", f"it has format {version}; this zcache reads format {FORMAT}")
    except OSError as e:
        status: Status = "damaged" if e.errno in _NO_ENTRY else "unreadable"
        return EntryInfo(key, status, f"{e.strerror or e}")


def format_of(data: bytes) -> str | None:
    """Return the format that a document says it has, if it is another than this zcache's."""
    try:
        version = json.loads(data)["attributes"]["zcache"]["format"]
    except _MALFORMED:
        return None
    return None if version == FORMAT and type(version) is int else f"{version!r:.40}"


def _without_document(store: Store, key: str) -> EntryInfo:
    try:
        there = files.exists(store.entry_path(key))
    except OSError as e:
        return EntryInfo(key, "unreadable", f"{e.strerror or e}")
    return EntryInfo(key, "damaged", f"it has no {DOCUMENT}") if there else EntryInfo(key, "gone", "it was removed")


def _read(key: str, data: bytes, pipelines: Pipelines) -> EntryInfo:
    start = check_document(data)
    try:
        text = data.decode("ascii")
        about, pipeline, payload = _about(text, start, pipelines)
        end = text.rindex(_END)
        arrays, metadata, documents = _described(text, end)
        references = _REFERENCE.findall(text, payload, end)
        return _info(key, about, pipeline, arrays, metadata, references, len(data) + documents)
    except _MALFORMED as e:
        parse_entry(data)  # says what is wrong
        raise EntryDamagedError(f"its zarr.json is malformed: {type(e).__name__}: {e!s:.200}") from e


def _about(text: str, at: int, pipelines: Pipelines) -> tuple[dict[str, Json], Pipeline | None, int]:
    """Read what precedes the payload; return it, the pipeline, and where the payload begins."""
    about: dict[str, Json] = {}
    pipeline = None
    while text[at] == ",":
        name, at = _DECODER.raw_decode(text, at + 1)
        at += 1  # the colon
        if name == "payload":
            break
        if name == "pipeline":
            known = pipelines.known_at(text, at)
            if known is None:
                described, end = _DECODER.raw_decode(text, at)
                known = pipelines.add(text[at:end], described), end
            pipeline, at = known
        else:
            about[name], at = _DECODER.raw_decode(text, at)
    if about["format"] != FORMAT:
        raise EntryDamagedError(f"it has format {about['format']!r:.40}")
    return about, pipeline, at


def _described(text: str, end: int) -> tuple[dict[str, Json], dict[str, Json], int]:
    """Read what the document says of the arrays; also the bytes of the arrays' own documents.

    The last list of arrays that ends exactly where the payload's attributes do is the entry's own: whatever an item or
    an array is called, one inside of it ends before.
    """
    start = end + len(_END)
    end = _end_of_own(text, end)
    at = text.rindex(_ARRAYS, 0, end + 1)
    while True:
        arrays, stop = _DECODER.raw_decode(text, at + len(_ARRAYS) - 1)
        if stop == end:
            break
        at = text.rindex(_ARRAYS, 0, at)
    metadata, stop = _DECODER.raw_decode(text, start)
    names = sum(len(json.dumps(name)) + 1 for name in metadata) + max(0, len(metadata) - 1)
    return arrays, metadata, stop - start - 2 - names


def _end_of_own(text: str, end: int) -> int:
    """Return where zcache's attributes end, given where all of them do: before those for viewers, if there are any."""
    at = text.rfind(_OME, 0, end)
    if at >= 0 and _DECODER.raw_decode(text, at + len(_OME))[1] == end:
        return at
    return end - 1  # the brace


def _info(
    key: str,
    about: dict[str, Json],
    pipeline: Pipeline | None,
    arrays: Mapping[str, Json],
    metadata: Mapping[str, Json],
    references: list[tuple[str, str, str, str]],
    document_bytes: int,
) -> EntryInfo:
    said = {name: (extra or dtype, shape) for dtype, shape, name, extra in references}
    listed = tuple(_array(name, described, metadata, *said.get(name, ("", ""))) for name, described in arrays.items())
    created = about.get("created")
    return EntryInfo(
        key,
        created=_time(created) if isinstance(created, str) else None,
        source=_sources(about.get("source")),
        stamps=read_stamps(about.get("sources")),
        pipeline=pipeline,
        arrays=listed,
        document_bytes=document_bytes,
    )


def _array(name: str, described: Json, consolidated: Mapping[str, Json], dtype: str, shape: str) -> ArrayInfo:
    path = "/".join(array_parts(name, is_label=described.get("is_label") is True))
    metadata = consolidated[path]
    narrowing = described["narrowing"]
    sharding = metadata["codecs"][0]["configuration"]
    blosc = sharding["codecs"][1]["configuration"]
    stored_shape = tuple(int(n) for n in metadata["shape"])
    restored, itemsize = _dtype(str(narrowing["dtype"]))
    return ArrayInfo(
        name=name,
        path=path,
        shape=tuple(int(n) for n in shape.split(",") if n) if dtype else stored_shape,
        dtype=_dtype(dtype)[0] if dtype else restored,
        stored_dtype=str(metadata["data_type"]),
        chunk_shape=tuple(int(n) for n in sharding["chunk_shape"]),
        codec=f"{blosc['cname']} {blosc['clevel']} {blosc['shuffle']}",
        narrowing=str(narrowing["kind"]),
        max_abs_error=float.fromhex(narrowing["max_abs_error"]),
        raw_bytes=math.prod(stored_shape) * itemsize,
        stored_bytes=int(described["shard_nbytes"]),
    )


@lru_cache(maxsize=256)
def _dtype(text: str) -> tuple[str, int]:
    """Return how a dtype is called, ``float32`` for ``<f4``, and its bytes: 0 for ``bfloat16``, which numpy lacks."""
    try:
        dtype = np.dtype(text)
    except TypeError:
        return text, 0
    return dtype.name if dtype.kind in "biufc" and dtype.isnative else text, dtype.itemsize


def _time(text: str) -> dt.datetime | None:
    try:
        created = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return created if created.tzinfo else created.replace(tzinfo=dt.UTC)


def _sources(source: Json) -> tuple[str, ...]:
    if source is None:
        return ()
    return tuple(map(str, source)) if isinstance(source, list) else (str(source),)


def _with_indexes(store: Store, info: EntryInfo) -> EntryInfo:
    indexes = tuple(_index(store, info.key, name) for name in child_names(store, info.key))
    return replace(info, indexes=indexes) if indexes else info


def child_names(store: Store, key: str) -> Iterator[str]:
    """Yield the names of the groups that were added to an entry."""
    try:
        names = sorted(name for name, is_dir in files.list_directory(store.entry_path(key)) if is_dir)
    except FileNotFoundError:  # removed meanwhile
        return
    yield from (name for name in names if name.startswith(INDEX_PREFIX) and is_array_name(name))


def _index(store: Store, key: str, name: str) -> IndexInfo:
    try:
        data = store.read_document(key, name)
        start = check_document(data)
        text = data.decode("ascii")
        about, _, _ = _about(text, start, Pipelines())
        arrays, _, documents = _described(text, text.rindex(_END))
        stored_bytes = sum(int(array["shard_nbytes"]) for array in arrays.values())
    except OSError as e:
        return IndexInfo(name, None, 0, e.strerror or str(e))
    except _MALFORMED as e:
        return IndexInfo(name, None, 0, f"its zarr.json is malformed: {type(e).__name__}")
    return IndexInfo(name, about.get("voxels"), len(data) + documents + stored_bytes)
