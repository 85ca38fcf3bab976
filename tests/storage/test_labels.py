"""Labels over an image lie in groups of their own: the places, the bytes, and what is read from there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zarr

import zcache
from tests.support import BrokenDisk, SystemCalls, ct_like, files_under, key, record_of, same_bits, staging_left
from zcache.encoding.array_layout import array_parts
from zcache.encoding.layout import parse_entry
from zcache.encoding.payload import decode_item, encode_item
from zcache.inspection.prune import candidates
from zcache.inspection.verify import verify
from zcache.storage import writer
from zcache.storage.entry import OpenEntries
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads
from zcache.storage.writer import WriteSettings, write_entry

SHAPE = (1, 20, 22, 24)


def labels(seed: int = 0, dtype="f4") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5, SHAPE).astype(dtype)


def item() -> dict:
    return {
        "image": ct_like(SHAPE).astype("f4"),
        "label": labels(),
        "parts": {"seg": labels(1, "i8")[0]},
        "mask": labels(2) > 2,
        "weights_mask": labels(3) / 3,
        "labels": labels(4, "u2"),
    }


OVER_IMAGE = {"label", "parts.seg", "labels-array"}


def put(store: Store, value, how: WriteSettings | None = None) -> None:
    assert write_entry(store, key(1), encode_item(value), how or WriteSettings(), {}).published


def get(store: Store) -> dict:
    entry, _ = OpenEntries(store, ReadThreads()).open(key(1))
    return decode_item(entry.tree, entry.read)


def assert_same(found, value) -> None:
    for name, array in value.items():
        if isinstance(array, dict):
            assert_same(found[name], array)
        else:
            assert same_bits(found[name], array), name


def test_labels_over_an_image_lie_among_the_labels_and_are_read_bit_by_bit(tmp_path):
    store = Store(tmp_path)
    put(store, item())
    assert_same(get(store), item())
    record = record_of(store, key(1))
    assert {name for name, array in record.arrays.items() if array.is_label} == OVER_IMAGE
    entry = store.entry_path(key(1))
    assert sorted(p.name for p in entry.iterdir()) == ["image", "labels", "mask", "weights_mask", "zarr.json"]
    assert sorted(p.name for p in (entry / "labels").iterdir()) == sorted([*OVER_IMAGE, "zarr.json"])
    assert json.loads((entry / "labels/zarr.json").read_text())["attributes"]["ome"]["labels"] == [
        name for name in record.arrays if name in OVER_IMAGE
    ]


def test_zarr_opens_the_groups_by_the_entrys_document_and_by_their_own(tmp_path):
    store = Store(tmp_path)
    put(store, item())
    entry = zarr.open_group(store.entry_path(key(1)), mode="r")
    assert entry.metadata.consolidated_metadata is not None
    for path in ("labels", "labels/label", "labels/label/0", "image", "mask"):
        alone = zarr.open(store.entry_path(key(1)) / path, mode="r", use_consolidated=False)
        assert dict(alone.attrs) == dict(entry[path].attrs)
        assert isinstance(alone, type(entry[path]))
    found = entry["labels/label/0"]
    assert found.metadata.dimension_names == ("c", "x", "y", "z")
    assert found.dtype == np.uint8
    assert np.array_equal(found[...], item()["label"])
    assert [m["name"] for m in entry.attrs["ome"]["multiscales"]] == ["image", "mask", "weights_mask"]
    assert list(entry.attrs) == ["zcache", "ome"]


def test_entries_without_what_is_for_viewers_are_read_as_before(tmp_path, monkeypatch):
    """As they were written before format 1 was complete: no names of axes, labels beside the image."""
    store = Store(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(writer, "find_images", lambda *_: {})
        put(store, item())
    record = record_of(store, key(1))
    assert record.ome is None
    assert not any(array.axes or array.is_label for array in record.arrays.values())
    assert (store.entry_path(key(1)) / "label").is_dir()
    assert_same(get(store), item())
    assert [verdict.status for verdict in verify(zcache.open_cache(tmp_path))] == ["ok"]


def test_inspection_knows_the_places(tmp_path):
    put(Store(tmp_path), item())
    view = zcache.open_cache(tmp_path)
    entry = view[key(1)]
    assert {array.name: array.path for array in entry.info.arrays} == {
        name: "/".join(array_parts(name, is_label=name in OVER_IMAGE)) for name in entry.arrays
    }
    assert np.array_equal(entry.arrays["label"][...], item()["label"])
    assert entry.info.stored_bytes == sum(len(data) for _, data in files_under(entry.path).values())
    [verdict] = verify(view)
    assert (verdict.status, verdict.findings, verdict.checked_bytes) == ("ok", (), entry.info.stored_bytes)
    assert len(candidates(view)) == 1
    assert same_bits(entry.read("labels"), item()["labels"])


@pytest.mark.parametrize("value", [{"ome": ct_like()}, {"a": {"ome": {"version": "0.5"}}, "label": ct_like()}])
def test_a_list_is_not_led_astray_by_what_is_called_so(tmp_path, value):
    put(Store(tmp_path), value)
    info = zcache.open_cache(tmp_path)[key(1)].info
    assert (info.status, [array.path for array in info.arrays]) == ("ok", [array.name for array in info.arrays])


def test_fsync_has_the_documents_and_directories_of_labels_on_the_disk(tmp_path, monkeypatch):
    store = Store(tmp_path)
    put(store, {"x": ct_like()})
    store.remove(key(1))
    names: dict[int, str] = {}
    synced, written = [], []

    def meddle(_n, name, real, args, kwargs):
        result = real(*args, **kwargs)
        if name == "open":
            names[result] = str(args[0]).partition("staging/")[2].partition("/")[2].partition("/")[2]
        elif name in ("write", "fsync"):
            (written if name == "write" else synced).append(names[args[0]])
        return result

    with monkeypatch.context() as m:
        SystemCalls(m, meddle)
        put(store, {"image": ct_like(SHAPE), "label": labels()}, WriteSettings(durable=True))
    entry = store.entry_path(key(1))
    inside = {str(p.relative_to(entry)) for p in entry.rglob("*")}
    assert inside <= set(synced)
    files = [name for name in inside if (entry / name).is_file()]
    assert sorted(written) == sorted(files)
    assert written[-1] == "zarr.json"  # the entry's own
    below = [name for name in synced if name and (entry / name).is_dir()]
    outer_inner = [(a, b) for a in below for b in below if b.startswith(a + "/")]
    assert outer_inner
    assert all(below.index(outer) > below.index(inner) for outer, inner in outer_inner)


def test_a_disk_that_refuses_any_step_leaves_nothing_behind(tmp_path, monkeypatch):
    for n in range(1, 200):
        store = Store(tmp_path / str(n))
        with monkeypatch.context() as m:
            disk = BrokenDisk(m, 28, n)
            try:
                put(store, {"image": ct_like(SHAPE), "label": labels()})
            except OSError:
                assert list(store.keys()) == []
                assert not any(p.is_dir() and p.name == "1" for p in staging_left(tmp_path / str(n)))
        if not disk.broken:
            break
        store.close()
    assert not disk.broken
    assert n > 20


def test_groups_that_are_added_to_an_entry_have_nothing_for_viewers(tmp_path):
    store = Store(tmp_path)
    put(store, {"image": ct_like(SHAPE)})
    child = encode_item({"image": ct_like((1, 90, 90)), "label": ct_like((1, 90, 90))})
    assert writer.write_child(store, key(1), "voxels-0", child, WriteSettings(), {})[0]
    record = parse_entry(store.read_document(key(1), "voxels-0"))
    assert (record.ome, record.label_groups) == (None, {})
    assert not any(array.axes or array.is_label for array in record.arrays.values())
