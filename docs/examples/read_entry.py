"""Read an entry of a cache of format 1 without zcache and without Zarr: `python read_entry.py CACHE_DIR KEY`."""

import base64
import json
import struct
import sys
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from read_arrays import read_arrays


def read_entry(cache_dir, key):
    """Return the item, with tensors as arrays and MetaTensors as dicts, and what the entry says about itself."""
    arrays, own = read_arrays(cache_dir, key)
    tags = {
        **TAGS,
        "$ndarray": lambda ref: array(ref, arrays),
        "$npscalar": lambda ref: array(ref, arrays)[()],
        "$tensor": lambda body: array(body["data"], arrays),
        "$metatensor": lambda body: {**body, "data": array(body["data"], arrays)},
    }
    about = {k: v for k, v in own.items() if k not in ("crc32c", "format", "payload", "arrays")}
    return decode(own["payload"], tags), about


def array(ref, arrays):
    """Return an array of the item: numbers as little-endian ones, swapped if need be, all others as their bytes."""
    dtype = np.dtype(ref["dtype"])
    raw = base64.b64decode(ref["base64"]) if "base64" in ref else arrays[ref["array"]].tobytes()
    if not raw:
        return np.zeros(ref["shape"], dtype)
    if dtype.str[0] == ">" and dtype.kind in "iufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return np.frombuffer(raw, dtype.newbyteorder("<")).byteswap().view(dtype).reshape(ref["shape"])
    return np.frombuffer(raw, dtype).reshape(ref["shape"])


def decode(node, tags):
    """Return a value of the payload; what is of torch alone, or of your own code, stays as it is written."""
    if isinstance(node, list):
        return [decode(n, tags) for n in node]
    if not isinstance(node, dict):
        return node
    inner = {k: decode(v, tags) for k, v in node.items()}
    tag = next(iter(inner), "")
    return tags[tag](inner[tag]) if tag in tags else inner


def float_of(digits):
    return struct.unpack(">d", bytes.fromhex(digits))[0]


TAGS = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordereddict": OrderedDict,
    "$torch.size": tuple,
    "$enum": tuple,
    "$range": lambda n: range(*n),
    "$slice": lambda n: slice(*n),
    "$float": float_of,
    "$complex": lambda n: complex(*map(float_of, n)),
    "$int": lambda n: int(n, 16),
    "$bytes": base64.b64decode,
    "$bytearray": lambda n: bytearray(base64.b64decode(n)),
    "$ellipsis": lambda _: ...,
    "$dtype": np.dtype,
    "$path": lambda n: {"posix": PurePosixPath, "windows": PureWindowsPath}.get(n[0], Path)(n[1]),
}


if __name__ == "__main__":
    found, about = read_entry(*sys.argv[1:])
    print(json.dumps(about, indent=1), found, sep="\n")
