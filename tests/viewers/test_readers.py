"""zarr-python, tensorstore and zarrita.js read every array bit by bit as zcache does; JavaScript restores the values.

Complex numbers are left out: JavaScript has none. Half-precision ones are compared where Node.js has them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

import zcache
from tests.support import read_array, record_of
from tests.viewers.caches import CODECS, demo_cache, generated_caches, scan_caches
from tests.viewers.tools import run_node
from zcache.encoding.array_layout import ArrayRecord, shard_path
from zcache.encoding.narrowing import Narrowing
from zcache.inspection.entry import EntryView

LACKING = {"<f2"}  # in Node.js before 24


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of a cache, as zcache reads it."""

    entry: EntryView
    name: str
    record: ArrayRecord

    @property
    def path(self) -> Path:
        [path] = [array.path for array in self.entry.info.arrays if array.name == self.name]
        return self.entry.path / path

    @property
    def codes(self) -> np.ndarray:
        """What is stored."""
        dtype = self.record.dtype
        as_they_are = dataclasses.replace(self.record, narrowing=Narrowing("identity", dtype, dtype))
        return read_array(self.path / shard_path(len(self.record.grid.shape)), as_they_are)


def stored(cache_dir: Path) -> Iterator[Stored]:
    view = zcache.open_cache(cache_dir)
    assert view
    for key, entry in view.items():
        for name, record in record_of(view.store, key).arrays.items():
            yield Stored(entry, name, record)


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<"))).hexdigest()


def by_zarr(array: Stored) -> np.ndarray:
    return zarr.open_array(str(array.path), mode="r", zarr_format=3)[...]


def by_tensorstore(array: Stored) -> np.ndarray:
    kvstore = {"driver": "file", "path": f"{array.path}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result().read().result()


def check(arrays: list[Stored]) -> None:
    """Compare what the four readers have, array by array."""
    for array in arrays:
        codes = array.codes
        for read in (by_zarr, by_tensorstore):
            found = read(array)
            assert (found.dtype, found.shape) == (codes.dtype, codes.shape), (read, array)
            assert sha256(found) == sha256(codes), (read, array)
    wanted = [
        {"entry": str(a.entry.path), "array": a.name, "path": str(a.path.relative_to(a.entry.path))} for a in arrays
    ]
    for array, found in zip(arrays, json.loads(run_node("hashes.mjs", asked=wanted)), strict=True):
        if "lacks" in found:
            assert found["lacks"] in LACKING
            continue
        codes, values = array.codes, array.entry.read(array.name)
        assert found == {
            "dtype": codes.dtype.name,
            "shape": list(codes.shape),
            "codes": sha256(codes),
            "values": sha256(values),
        }, array


def test_the_demo(tmp_path):
    arrays = list(stored(demo_cache(tmp_path)))
    assert sorted((a.name, a.record.narrowing.kind, a.record.dtype.str) for a in arrays) == [
        ("image", "table", "<u2"),
        ("image", "table", "<u2"),
        ("label", "cast", "|u1"),
        ("label", "cast", "|u1"),
    ]
    check(arrays)


def test_real_scans(shared_data, tmp_path):
    arrays = [array for cache in scan_caches(shared_data, tmp_path) for array in stored(cache)]
    assert len({Path(source).name for a in arrays for source in a.entry.info.source}) == len(
        list(shared_data.glob("*.nii.gz"))
    )
    assert {a.record.narrowing.kind for a in arrays} == {"identity", "cast", "table", "affine"}
    check(arrays)


def test_every_narrowing_and_codec(tmp_path):
    arrays = [array for cache in generated_caches(tmp_path) for array in stored(cache)]
    assert {a.record.codec.cname for a in arrays} == set(CODECS)
    assert {(a.record.narrowing.kind, a.record.dtype.str, a.record.narrowing.dtype.str) for a in arrays} >= {
        ("identity", "|b1", "|b1"),
        ("identity", "<f4", "<f4"),
        ("cast", "|u1", "<i8"),
        ("cast", "<i2", "<f4"),
        ("cast", "<u2", "<f8"),
        ("cast", "<f4", "<f8"),
        ("cast", "<f2", "<f4"),
        ("table", "|u1", "<f4"),
        ("table", "<u2", "<f8"),
        ("affine", "|u1", "<f8"),
        ("affine", "<u2", "<f4"),
    }
    check(arrays)


def test_chunks_are_left_out_and_stick_out(tmp_path):
    """What the generated arrays are there to show."""
    for array in stored(generated_caches(tmp_path)[0]):
        grid = array.record.grid
        index = np.frombuffer((array.path / shard_path(4)).read_bytes()[-16 * grid.n_chunks - 4 : -4], "<u8")
        assert (index == 2**64 - 1).any(), array.name
        assert all(n % c for n, c in zip(grid.shape[1:], grid.chunk_shape[1:], strict=True))


@pytest.mark.parametrize("name", ["package-lock.json", "package.json", ".npmrc"])
def test_the_packages_are_not_tied_to_a_registry(name):
    assert "://" not in (Path(__file__).parent / name).read_text()
