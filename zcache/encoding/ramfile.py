"""The form of an item in memory that processes share: one file, its arrays' codes as they are, ready to be mapped.

A file is a head of 64 bytes (magic, sizes, checksum), a JSON document (payload tree and, for each array, shape,
narrowing and place), and the look-up tables and codes, each from a multiple of 64 bytes on, little-endian, in C order.
Codes are neither compressed nor cut into chunks: a box of an array is a strided copy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcache.encoding import narrowing as nw
from zcache.encoding.array_layout import dump_document
from zcache.encoding.layout import MAX_DOCUMENT_BYTES
from zcache.encoding.names import is_array_name
from zcache.encoding.payload import Json
from zcache.encoding.shard import crc32c
from zcache.encoding.storable import CORE_DTYPES, parse_dtype
from zcache.errors import EntryDamagedError, UnstorableError

__all__ = ["HEAD_NBYTES", "RamArray", "RamFile", "RamPlan", "parse_head", "parse_ram_file", "plan_ram_file"]

HEAD_NBYTES = 64
_MAGIC = b"zcache ram 1"
_HEAD = struct.Struct("<16sQQI")  # magic, bytes of the file, bytes of the document, the document's CRC-32C
_ALIGN = 64  # a cache line, and a multiple of every item size
_MAX_AXES = 64  # numpy's limit


@dataclass(frozen=True, slots=True, eq=False)
class RamArray:
    """One array of a file.

    Attributes
    ----------
    shape : tuple of int
        Extents.
    narrowing : Narrowing
        How codes become values.
    start : int
        Where its codes begin, in bytes from the beginning of the file.
    """

    shape: tuple[int, ...]
    narrowing: nw.Narrowing
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return math.prod(self.shape) * self.narrowing.code_dtype.itemsize

    def codes(self, data: Any) -> np.ndarray:
        """Return the codes as a view of a file's bytes."""
        flat = np.frombuffer(data, self.narrowing.code_dtype, math.prod(self.shape), self.start)
        return flat.reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class RamFile:
    """What a file says.

    Attributes
    ----------
    tree : Json
        The payload tree.
    arrays : mapping of str to RamArray
        The arrays by name.
    """

    tree: Json
    arrays: Mapping[str, RamArray]


@dataclass(frozen=True, slots=True, eq=False)
class RamPlan:
    """A file that is to be written.

    Attributes
    ----------
    nbytes : int
        Of the whole file.
    pieces : tuple of (int, bytes)
        Head, document and tables, each with the place where it goes.
    file : RamFile
        What the file will say; the codes of its arrays are still to be written, each from its `start` on.
    """

    nbytes: int
    pieces: tuple[tuple[int, bytes], ...]
    file: RamFile


def plan_ram_file(tree: Json, arrays: Iterable[tuple[str, tuple[int, ...], nw.Narrowing]]) -> RamPlan:
    """Lay out a file.

    Parameters
    ----------
    tree : Json
        Payload tree of the item.
    arrays : iterable of (str, tuple of int, Narrowing)
        Name, shape and narrowing of each array.

    Raises
    ------
    UnstorableError
        The document would be longer than a reader believes.

    Examples
    --------
    >>> codes, narrowing = nw.narrow(np.arange(4096.0))
    >>> plan = plan_ram_file({"x": 1}, [("x", codes.shape, narrowing)])
    >>> plan.nbytes - plan.file.arrays["x"].start == codes.nbytes == 8192
    True
    """
    listed = list(arrays)
    tables = {name: _table_bytes(narrowing) for name, _, narrowing in listed}
    # Places count from the end of the document, whose own length depends on them otherwise.
    described: dict[str, Json] = {}
    places: dict[str, int] = {}
    end = 0
    for name, shape, narrowing in listed:
        described[name] = {"shape": list(shape), "narrowing": nw.to_json(narrowing)}
        if tables[name]:
            described[name]["table"] = end
            end = _aligned(end + len(tables[name]))
        places[name] = described[name]["start"] = end
        end = _aligned(end + math.prod(shape) * narrowing.code_dtype.itemsize)
    document = dump_document({"payload": tree, "arrays": described})
    if len(document) > MAX_DOCUMENT_BYTES:
        raise UnstorableError(f"the item takes {len(document)} bytes of JSON, {MAX_DOCUMENT_BYTES} at most")
    base = _aligned(HEAD_NBYTES + len(document))
    nbytes = base + end
    pieces = [(0, _HEAD.pack(_MAGIC, nbytes, len(document), crc32c(document)).ljust(HEAD_NBYTES, b"\0"))]
    pieces.append((HEAD_NBYTES, document))
    pieces += [(base + described[name]["table"], table) for name, table in tables.items() if table]
    file = RamFile(tree, {name: RamArray(shape, how, base + places[name]) for name, shape, how in listed})
    return RamPlan(nbytes, tuple(pieces), file)


def parse_head(data: Any, nbytes: int) -> tuple[int, int]:
    """Read the head of a file; return size and checksum of its document.

    Parameters
    ----------
    data : buffer
        The file, or its first bytes.
    nbytes : int
        Size of the file.

    Raises
    ------
    EntryDamagedError
        It is no such file, or was cut short or lengthened.
    """
    if nbytes < HEAD_NBYTES:
        raise EntryDamagedError(f"a file in memory has {nbytes} bytes, no less than {HEAD_NBYTES} could be right")
    magic, whole, document_nbytes, checksum = _HEAD.unpack_from(data)
    if magic.rstrip(b"\0") != _MAGIC:
        raise EntryDamagedError("a file in memory is not one of zcache's")
    if whole != nbytes or _aligned(HEAD_NBYTES + document_nbytes) > nbytes:
        raise EntryDamagedError(f"a file in memory has {nbytes} bytes instead of {whole}")
    return document_nbytes, checksum


def parse_ram_file(data: Any, nbytes: int) -> RamFile:
    """Read what a file says, checking all of it.

    Parameters
    ----------
    data : buffer
        The file.
    nbytes : int
        Its size.

    Raises
    ------
    EntryDamagedError
        It contradicts itself; the message says how.
    """
    document_nbytes, checksum = parse_head(data, nbytes)
    if document_nbytes > MAX_DOCUMENT_BYTES:
        raise EntryDamagedError(f"a file in memory has a document of {document_nbytes} bytes")
    document = bytes(memoryview(data)[HEAD_NBYTES : HEAD_NBYTES + document_nbytes])
    if crc32c(document) != checksum:
        raise EntryDamagedError("the document of a file in memory does not match its checksum")
    base = _aligned(HEAD_NBYTES + document_nbytes)
    try:
        parsed = json.loads(document)
        arrays = {name: _parse_array(name, described, data, base) for name, described in parsed["arrays"].items()}
        tree = parsed["payload"]
    except EntryDamagedError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        raise EntryDamagedError(f"a file in memory is malformed: {type(e).__name__}: {e!s:.200}") from e
    for name, array in arrays.items():
        if array.start + array.nbytes > nbytes:
            raise EntryDamagedError(f"a file in memory ends before its array {name!r}")
    return RamFile(tree, arrays)


def _parse_array(name: str, described: Json, data: Any, base: int) -> RamArray:
    shape = tuple(described["shape"])
    usual = 1 <= len(shape) <= _MAX_AXES and all(type(n) is int and n > 0 for n in shape)
    if not is_array_name(name) or not usual:
        raise EntryDamagedError(f"a file in memory has an array {name!r:.100} of shape {shape!r:.100}")
    table = None
    if "table" in described:
        dtype = parse_dtype(str(described["narrowing"]["dtype"]))
        if dtype.str not in CORE_DTYPES:
            raise EntryDamagedError(f"a file in memory has a look-up table of {dtype}")
        # A copy: it is kept longer than the mapping.
        place = base + _place(described["table"])
        table = np.frombuffer(data, dtype, int(described["narrowing"]["entries"]), place).copy()
    return RamArray(shape, nw.from_json(described["narrowing"], table), base + _place(described["start"]))


def _place(value: Json) -> int:
    if type(value) is not int or value < 0 or value % _ALIGN:
        raise EntryDamagedError(f"a file in memory has something at {value!r:.100}")
    return value


def _table_bytes(narrowing: nw.Narrowing) -> bytes:
    table = narrowing.table
    return b"" if table is None else table.astype(table.dtype.newbyteorder("<"), copy=False).tobytes()


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
