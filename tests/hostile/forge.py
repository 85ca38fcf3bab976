"""Entries taken apart, changed, and put together with every checksum right: what somebody with write access can do.

The checksums of the format find damage; they are no signatures. So a forged entry passes all of them, and whatever a
reader is told by it has to be harmless in itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zcache.encoding.array_layout import array_parts, shard_path
from zcache.encoding.layout import parse_entry
from zcache.encoding.shard import SEAL_BYTES, ShardIndex, crc32c

HEAD = b'{"zarr_format":3,"node_type":"group","attributes":{"zcache":{"crc32c":"'
MISSING = 2**64 - 1


def sealed(document: Any) -> bytes:
    """A document as text with a right checksum, whatever it says."""
    return sealed_text(json.dumps(document, separators=(",", ":")).encode())


def sealed_text(data: bytes) -> bytes:
    """Any text with the checksum of an entry's document made right; what lacks its place stays as it is."""
    if not data.startswith(HEAD):
        return data
    tail = data[len(HEAD) + 8 :]
    return HEAD + b"%08x" % crc32c(tail) + tail


def with_payload(tree_json: str, rest: str = '"arrays":{}', metadata: str = "{}") -> bytes:
    """The document of an entry with a payload tree given as text, so that it may be what no JSON writer makes."""
    tail = f'","format":1,"payload":{tree_json},{rest}}}}},"consolidated_metadata":{{"metadata":{metadata}}}}}'
    return sealed_text(HEAD + b"00000000" + tail.encode())


@dataclass
class Shard:
    """The shard of one array.

    Attributes
    ----------
    streams : list of bytes
        The Blosc stream of each chunk; empty for one that is left out.
    table : numpy.ndarray or None
        Offsets and lengths in place of the true ones.
    """

    streams: list[bytes]
    table: np.ndarray | None = None

    @classmethod
    def parse(cls, data: bytes, n_chunks: int) -> Shard:
        index = ShardIndex.decode(data[len(data) - ShardIndex.nbytes(n_chunks) :], n_chunks, len(data))
        places = index.places()
        return cls([b"" if p is None else data[p[0] : p[0] + p[1] - 4] for p in places])

    def encode(self) -> tuple[bytes, int, int]:
        """Its bytes, its seal, and the checksum of its index: all right."""
        checks = [crc32c(s).to_bytes(4, "little") if s else b"" for s in self.streams]
        frames = [s + c for s, c in zip(self.streams, checks, strict=True)]
        true = ShardIndex.from_lengths([len(f) for f in frames])
        index = (true if self.table is None else ShardIndex(self.table)).encode()
        seal = crc32c(b"".join(checks))
        return (
            b"".join(frames) + seal.to_bytes(SEAL_BYTES, "little") + index,
            seal,
            int.from_bytes(index[-4:], "little"),
        )

    def true_table(self) -> np.ndarray:
        return ShardIndex.from_lengths([len(s) + 4 if s else 0 for s in self.streams]).table.copy()


@dataclass
class Forged:
    """An entry whose parts may be changed at will.

    Attributes
    ----------
    document : dict
        What its ``zarr.json`` says.
    shards : dict of str to Shard
        Its arrays.
    """

    document: Any
    shards: dict[str, Shard] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Forged:
        """Take a sound entry apart."""
        data = (folder / "zarr.json").read_bytes()
        arrays = parse_entry(data).arrays
        shards = {
            name: Shard.parse(
                folder.joinpath(*array_parts(name, is_label=a.is_label), shard_path(len(a.grid.shape))).read_bytes(),
                a.grid.n_chunks,
            )
            for name, a in arrays.items()
        }
        return cls(json.loads(data), shards)

    @property
    def arrays(self) -> dict[str, Any]:
        """What is said of each array by zcache."""
        return self.document["attributes"]["zcache"]["arrays"]

    @property
    def metadata(self) -> dict[str, Any]:
        """What is said of each array in Zarr's terms, by its path."""
        return self.document["consolidated_metadata"]["metadata"]

    def files(self) -> dict[str, bytes]:
        """Its files by path within the entry, all checksums right."""
        found = {}
        for name, shard in self.shards.items():
            data, seal, index_crc32c = shard.encode()
            about = {"shard_nbytes": len(data), "seal": f"{seal:08x}", "index_crc32c": f"{index_crc32c:08x}"}
            self.arrays[name].update(about)
            place = "/".join(array_parts(name, is_label="is_label" in self.arrays[name]))
            found[f"{place}/{shard_path(len(self.metadata[place]['shape']))}"] = data
        return {**found, "zarr.json": sealed(self.document)}

    def write(self, folder: Path) -> None:
        """Put it in the place of an entry."""
        put(folder, self.files())


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def array_metadata(shape: list[int], chunk_shape: list[int], dtype: str = "uint8", itemsize: int = 1) -> dict[str, Any]:
    """What this format says of an array, of any shape at all."""
    whole = [-(-n // c) * c for n, c in zip(shape, chunk_shape, strict=True)]
    order = {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "typesize": itemsize, "blocksize": 0}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": chunk_shape,
        "codecs": [order, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": whole}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if dtype.startswith("float") else 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
    }


def made_up(arrays: dict[str, tuple[dict[str, Any], dict[str, Any], Shard]], tree: Any) -> Forged:
    """An entry from nothing: for each array its metadata, its narrowing with table, and its shard."""
    own = {"crc32c": "00000000", "format": 1, "payload": tree, "arrays": {n: dict(a[1]) for n, a in arrays.items()}}
    document = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"zcache": own},
        "consolidated_metadata": {"metadata": {n: a[0] for n, a in arrays.items()}},
    }
    return Forged(document, {n: a[2] for n, a in arrays.items()})


def narrowing(kind: str, dtype: str, code_dtype: str, **more: Any) -> dict[str, Any]:
    """What is said of how codes become values."""
    return {"narrowing": {"kind": kind, "dtype": dtype, "code_dtype": code_dtype, "max_abs_error": "0x0.0p+0", **more}}


def reference(name: str, shape: list[int], dtype: str = "|u1") -> dict[str, Any]:
    """A node of a payload tree that asks for an array."""
    return {"$ndarray": {"dtype": dtype, "shape": shape, "array": name}}
