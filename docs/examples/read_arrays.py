"""Read the arrays of an entry of format 1 without zcache and without Zarr: `python read_arrays.py CACHE_DIR KEY`."""

import base64
import json
import struct
import sys
from itertools import product
from pathlib import Path

import numpy as np
from google_crc32c import value as crc32c
from numcodecs import blosc

HEAD = b'{"zarr_format":3,"node_type":"group","attributes":{"zcache":{"crc32c":"'


def read_arrays(cache_dir, key):
    """Return the arrays of an entry by name, bit by bit as they were computed, and what else the entry says."""
    folder = Path(cache_dir, "cache.zarr", key)
    document = (folder / "zarr.json").read_bytes()
    check(document.startswith(HEAD), "it is not an entry")
    check(crc32c(document[len(HEAD) + 8 :]) == int(document[len(HEAD) :][:8], 16), "its document is damaged")
    group = json.loads(document)
    own, metadata = group["attributes"]["zcache"], group["consolidated_metadata"]["metadata"]
    check(own["format"] == 1, "it has another format")
    arrays = {}
    for name, described in own["arrays"].items():
        inside = f"labels/{name}/0" if described.get("is_label") else name
        arrays[name] = values(codes(folder / inside, metadata[inside], described), described)
    return arrays, own


def codes(folder, metadata, described):
    """Return an array as it is stored: chunk after chunk in C order, the index at the end."""
    shape, chunk_shape = metadata["shape"], metadata["codecs"][0]["configuration"]["chunk_shape"]
    counts = [-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)]
    shard = folder.joinpath("c", *["0"] * len(shape)).read_bytes()
    check(len(shard) == described["shard_nbytes"], "a shard has another size")
    size = 16 * int(np.prod(counts)) + 4
    index, seal = shard[-size:], shard[-size - 4 : -size]
    check(seal == bytes.fromhex(described["seal"])[::-1], "a shard is that of another entry")
    check(index[-4:] == bytes.fromhex(described["index_crc32c"])[::-1], "a shard is that of another entry")
    check(crc32c(index[:-4]) == int.from_bytes(index[-4:], "little"), "an index is damaged")
    padded = np.zeros([n * c for n, c in zip(counts, chunk_shape, strict=True)], metadata["data_type"])
    places = struct.iter_unpack("<QQ", index[:-4])
    for at, (start, nbytes) in zip(product(*map(range, counts)), places, strict=True):
        if nbytes < 2**64 - 1:  # else all of the chunk is zero
            chunk, checksum = shard[start : start + nbytes - 4], shard[start + nbytes - 4 : start + nbytes]
            check(crc32c(chunk) == int.from_bytes(checksum, "little"), "a chunk is damaged")
            box = tuple(slice(i * c, i * c + c) for i, c in zip(at, chunk_shape, strict=True))
            padded[box] = np.frombuffer(blosc.decompress(chunk), padded.dtype).reshape(chunk_shape)
    return padded[tuple(slice(n) for n in shape)]


def values(stored, described):
    """Return what the codes stand for."""
    how = described["narrowing"]
    dtype = np.dtype(how["dtype"])
    if how["kind"] == "table":
        return np.frombuffer(base64.b64decode(described["table"]), dtype)[stored]
    if how["kind"] == "affine":
        levels = float.fromhex(how["offset"]) + float.fromhex(how["scale"]) * np.arange(how["levels"])
        specials = np.array([int(bits, 16) for bits in how["specials"]], f"<u{dtype.itemsize}").view(dtype)
        return np.concatenate([levels.astype(dtype), specials])[stored]
    return stored.astype(dtype)  # "identity" and "cast"


def check(holds, otherwise):
    if not holds:
        raise ValueError(otherwise)


if __name__ == "__main__":
    for name, array in read_arrays(*sys.argv[1:])[0].items():
        print(name, array.dtype, array.shape, array.mean())
