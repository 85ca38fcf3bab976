"""What a list says of an entry: the same as its whole document, for every kind of entry and of damage."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import zcache
from tests.inspection.caches import about, fill, item
from tests.support import key
from zcache.encoding.layout import parse_entry
from zcache.inspection.listing import survey
from zcache.inspection.pipelines import Pipelines
from zcache.storage.store import Store

BIG = np.arange(10_000, dtype=np.float32)


def surveyed(folder):
    return survey(Store(folder), key(1), Pipelines())


def bytes_of(folder) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_every_byte_is_counted(cache_dir):
    store = Store(cache_dir)
    for name in list(store.keys()):
        assert survey(store, name, Pipelines()).stored_bytes == bytes_of(store.entry_path(name))


def test_what_is_said_of_an_array(cache_dir):
    info = surveyed(cache_dir)
    image, label = info.arrays
    assert (image.name, image.shape, image.dtype, image.stored_dtype) == ("image", (1, 40, 44, 48), "float32", "int16")
    assert (image.narrowing, image.max_abs_error) == ("cast", 0.0)
    assert image.raw_bytes == 40 * 44 * 48 * 4
    assert (label.dtype, label.stored_dtype, label.narrowing) == ("uint8", "uint8", "identity")
    assert info.source == tuple(about(1)["source"])
    assert [step.name for step in info.pipeline.steps] == ["LoadImaged", "Spacingd"]
    assert info.raw_bytes == image.raw_bytes + label.raw_bytes
    assert info.ratio == info.raw_bytes / info.stored_bytes
    assert info.created.tzinfo is not None


NASTY = {
    "arrays": BIG,
    "payload": {"arrays": {"a": 1}, "pipeline": 3},
    "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {"x": BIG}},
    "text": '}},"consolidated_metadata":{"kind":"inline","must_understand":false,"metadata":{},"arrays":{',
    "ref": {"dtype": "<f4", "shape": [3], "array": "z"},
}


@pytest.mark.parametrize(
    "value",
    [
        NASTY,
        {"a": BIG, "arrays": BIG.astype(np.float64) / 3},
        {"image": {"arrays": BIG}, "arrays": [BIG, BIG + 1]},
        {"arrays": {}},
        {},
        7,
        BIG,
        {'ä"\\': BIG, "\x00": "\x1b[2J"},
        {"strings": np.array(["ab", "ü"] * 3000), "swapped": BIG.astype(">f4"), "when": BIG.astype("<M8[s]")},
    ],
)
def test_names_that_the_document_uses_itself(tmp_path, value):
    folder = fill(tmp_path / "cache", {key(1): value})
    store = Store(folder)
    info = survey(store, key(1), Pipelines())
    record = parse_entry(store.read_document(key(1)))
    assert info.status == "ok"
    assert {a.name: (a.stored_dtype, a.chunk_shape, a.stored_bytes) for a in info.arrays} == {
        name: (array.dtype.name, array.grid.chunk_shape, array.shard_nbytes) for name, array in record.arrays.items()
    }
    assert info.stored_bytes == bytes_of(store.entry_path(key(1)))
    assert info.source == tuple(about(1)["source"])


def test_types_that_numpy_lacks_are_named_as_the_item_has_them(tmp_path):
    strings = np.array(["ab", "ü"] * 3000)
    info = surveyed(fill(tmp_path / "cache", {key(1): {"strings": strings, "swapped": BIG.astype(">f4")}}))
    found = {a.name: (a.shape, a.dtype) for a in info.arrays}
    assert found == {"strings": ((6000,), "<U2"), "swapped": ((10_000,), ">f4")}


def test_pipelines_are_read_once(cache_dir):
    pipelines = Pipelines()
    store = Store(cache_dir)
    first, second, other = (survey(store, name, pipelines).pipeline for name in (key(1), key(2), "f" * 32))
    assert first is second
    assert first is not other
    assert survey(store, key(1), pipelines).pipeline is first


def test_an_entry_that_somebody_put_without_a_word(tmp_path):
    folder = fill(tmp_path / "cache", {key(1): item(1)}, lambda _: None)
    info = surveyed(folder)
    assert (info.status, info.source, info.pipeline) == ("ok", (), None)
    assert info.created is not None


def test_damage_is_named(cache_dir):
    path = Store(cache_dir).entry_path(key(1)) / "zarr.json"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    info = surveyed(cache_dir)
    assert info.status == "damaged"
    assert "checksum" in info.problem
    path.write_bytes(b"")
    assert surveyed(cache_dir).status == "damaged"
    path.unlink()
    assert surveyed(cache_dir).problem == "it has no zarr.json"


def test_case_36_an_unknown_format_is_named(cache_dir):
    path = Store(cache_dir).entry_path(key(1)) / "zarr.json"
    path.write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"zcache": {"format": 7}}}))
    info = surveyed(cache_dir)
    assert info.status == "unknown format"
    assert info.problem == "it has format 7; this zcache reads format 1"
    path.write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    assert surveyed(cache_dir).status == "damaged"


def test_what_is_gone_and_what_is_no_entry(cache_dir):
    store = Store(cache_dir)
    shutil.rmtree(store.entry_path(key(1)))
    assert surveyed(cache_dir).status == "gone"
    store.entry_path(key(1)).write_text("a file")
    assert surveyed(cache_dir).status == "damaged"
    store.entry_path(key(1)).unlink()
    store.entry_path(key(1)).symlink_to(store.entry_path(key(2)))
    assert surveyed(cache_dir).status == "damaged"


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(cache_dir):
    (Store(cache_dir).entry_path(key(1)) / "zarr.json").chmod(0)
    info = surveyed(cache_dir)
    assert (info.status, info.problem) == ("unreadable", "Permission denied")


def test_what_may_not_be_read_whoever_asks(cache_dir, monkeypatch):
    def refuse(self, key, child=""):
        raise PermissionError(13, "Permission denied", str(self.root))

    monkeypatch.setattr(Store, "read_document", refuse)
    assert (surveyed(cache_dir).status, surveyed(cache_dir).problem) == ("unreadable", "Permission denied")


def test_a_disk_that_fails_is_no_reason_to_stop(view, monkeypatch):
    monkeypatch.setattr(
        "zcache.inspection.listing.files.list_directory", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error"))
    )
    assert {info.status for info in view.infos} == {"unreadable"}
    assert isinstance(view, zcache.CacheView)
