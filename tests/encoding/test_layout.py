"""The documents of a store: what zarr accepts, what comes back, and that nothing changed is ever believed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from zarr.core.group import GroupMetadata
from zarr.core.metadata.v3 import ArrayV3Metadata

from tests.strategies import CORE
from tests.support import same_bits
from zcache.encoding import layout
from zcache.encoding.array_layout import ArrayRecord, array_document, shard_path
from zcache.encoding.chunking import ChunkGrid
from zcache.encoding.layout import FORMAT, EntryRecord, entry_document, group_document, parse_entry, root_document
from zcache.encoding.narrowing import Narrowing, Precision, narrow
from zcache.encoding.ome import Image, entry_metadata, label_groups
from zcache.encoding.restoring import restore
from zcache.encoding.shard import BloscCodec, ShardIndex, crc32c
from zcache.errors import EntryDamagedError

TREE = {"image": {"$ndarray": {"dtype": "<f4", "shape": [1, 9, 8, 7], "array": "image"}}, "id": {"$tuple": [7, "ä"]}}
ABOUT = {"created": "2026-12-01T00:00:00+00:00", "source": ["/data/ct.nii.gz"], "pipeline": [{"name": "LoadImaged"}]}


def record_for(array: np.ndarray, precision="lossless", chunk_shape=None) -> ArrayRecord:
    codes, narrowing = narrow(array, Precision.parse(precision))
    grid = ChunkGrid(codes.shape, chunk_shape or codes.shape)
    return ArrayRecord(
        grid=grid,
        dtype=codes.dtype.newbyteorder("<"),
        codec=BloscCodec("zstd", 3, "bitshuffle"),
        narrowing=narrowing,
        shard_nbytes=ShardIndex.nbytes(grid.n_chunks) + 321,
        seal=0x00012345,
        index_crc32c=0x00ABCDEF,
    )


def sample_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (1, 9, 8, 7)
    return {
        "identity": rng.standard_normal(shape).astype("f4"),
        "cast": rng.integers(0, 500, shape).astype("f4"),
        "bytes": rng.integers(0, 9, (1, 9, 8, 70)).astype("f4") / 7,
        "words": rng.integers(0, 400, (1, 19, 18, 17)).astype("f8") / 7,
        "affine": rng.standard_normal(shape).astype("f4"),
    }


def entry() -> EntryRecord:
    arrays = sample_arrays()
    arrays["affine"][0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    lossless = {name: record_for(a, chunk_shape=(1, 4, 4, 4)) for name, a in arrays.items() if name != "affine"}
    return EntryRecord(TREE, {**lossless, "affine": record_for(arrays["affine"], 0.01)}, ABOUT)


def entry_with_images() -> EntryRecord:
    """The same with two of the arrays for viewers, one of them a label."""
    plain = entry()
    cast = replace(plain.arrays["cast"], axes="cxyz", is_label=True)
    arrays = {**plain.arrays, "identity": replace(plain.arrays["identity"], axes="cxyz"), "cast": cast}
    image, label = (Image(name, "cxyz", (1.0, 2.0, 2.0, 3.0), (), True) for name in ("identity", "cast"))
    return replace(plain, arrays=arrays, ome=entry_metadata([image]), label_groups=label_groups([label]))


def sealed(document: object) -> bytes:
    """A document with a valid checksum, whatever it says."""
    data = json.dumps(document, separators=(",", ":")).encode()
    head = b'{"zarr_format":3,"node_type":"group","attributes":{"zcache":{"crc32c":"'
    assert data.startswith(head)
    tail = data[len(head) + 8 :]
    return head + b"%08x" % crc32c(tail) + tail


def test_what_an_entry_says_comes_back():
    record = entry()
    kinds = {name: (a.narrowing.kind, a.dtype.str) for name, a in record.arrays.items()}
    assert kinds == {
        "identity": ("identity", "<f4"),
        "cast": ("cast", "<u2"),
        "bytes": ("table", "|u1"),
        "words": ("table", "<u2"),
        "affine": ("affine", "<u2"),
    }
    back = parse_entry(entry_document(record))
    assert back.tree == TREE
    assert back.about == ABOUT
    assert list(back.arrays) == list(record.arrays)
    for name, a in record.arrays.items():
        b = back.arrays[name]
        assert (b.grid, b.dtype, b.codec, b.shard_nbytes, b.seal, b.index_crc32c) == (
            a.grid, a.dtype, a.codec, a.shard_nbytes, a.seal, a.index_crc32c
        )  # fmt: skip
        codes = np.arange(256).astype(a.dtype)
        n = np.minimum(codes, a.narrowing.lut().size - 1).astype(a.dtype) if a.narrowing.lut() is not None else codes
        assert same_bits(restore(n, b.narrowing), restore(n, a.narrowing))
        assert b.narrowing.max_abs_error == a.narrowing.max_abs_error
    assert entry_document(back) == entry_document(record)


@pytest.mark.parametrize("dtype", CORE)
def test_zarr_accepts_the_metadata_of_every_dtype(dtype):
    array_type = np.dtype(dtype).newbyteorder("<")
    record = ArrayRecord(
        grid=ChunkGrid((3, 50, 70), (1, 16, 32)),
        dtype=array_type,
        codec=BloscCodec("lz4", 5, "shuffle"),
        narrowing=Narrowing("identity", np.dtype(dtype), np.dtype(dtype)),
        shard_nbytes=ShardIndex.nbytes(3 * 4 * 3) + 321,
        seal=1,
        index_crc32c=1,
    )
    metadata = ArrayV3Metadata.from_dict(json.loads(array_document(record)))
    assert metadata.shape == (3, 50, 70)
    assert metadata.data_type.to_native_dtype() == array_type
    assert metadata.fill_value == 0
    assert metadata.chunk_grid.chunk_shape == (3, 64, 96)
    (sharding,) = metadata.codecs
    assert sharding.chunk_shape == (1, 16, 32)
    assert sharding.index_location.value == "end"
    blosc = sharding.codecs[1]
    assert (blosc.typesize, blosc.cname.value, blosc.shuffle.value) == (array_type.itemsize, "lz4", "shuffle")


def test_zarr_accepts_the_document_of_an_entry_with_its_arrays_inline():
    record = entry()
    metadata = GroupMetadata.from_dict(json.loads(entry_document(record)))
    assert set(metadata.consolidated_metadata.metadata) == set(record.arrays)
    for name, array in record.arrays.items():
        inline = json.loads(entry_document(record))["consolidated_metadata"]["metadata"][name]
        assert inline == json.loads(array_document(array))
    assert GroupMetadata.from_dict(json.loads(root_document())).attributes == {"zcache": {"format": 1}}


def test_shards_lie_where_zarr_looks_for_them():
    record = record_for(np.zeros((2, 3, 4), "u1"))
    metadata = ArrayV3Metadata.from_dict(json.loads(array_document(record)))
    for ndim in (1, 3, 5):
        assert shard_path(ndim) == metadata.chunk_key_encoding.encode_chunk_key((0,) * ndim)


def test_every_changed_byte_of_a_document_is_detected():
    data = entry_document(EntryRecord({"a": 1}, {"x": record_for(sample_arrays()["cast"])}, {"created": "now"}))
    for i in range(len(data)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            broken = bytearray(data)
            broken[i] ^= mask
            with pytest.raises(EntryDamagedError):
                parse_entry(bytes(broken))


def test_every_truncation_and_any_addition_is_detected():
    data = entry_document(EntryRecord({"a": 1}, {}, {}))
    for broken in (*(data[:n] for n in range(len(data))), data + b" ", data + b"\0", b"\0" * len(data)):
        with pytest.raises(EntryDamagedError):
            parse_entry(broken)


def test_case_36_another_format_is_refused_by_its_number():
    document = json.loads(entry_document(entry()))
    for other in (FORMAT + 1, 0, None, "1"):
        document["attributes"]["zcache"]["format"] = other
        with pytest.raises(EntryDamagedError, match=f"format {other!r}"):
            parse_entry(sealed(document))


def test_case_36_documents_of_other_programs_are_refused():
    plain = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    array = array_document(record_for(np.ones(9)))
    for data in (b"", b"{}", json.dumps(plain).encode(), root_document(), b"\x80\x04", array):
        with pytest.raises(EntryDamagedError, match="not that of a zcache entry"):
            parse_entry(data)


def test_what_an_entry_says_about_itself_cannot_replace_what_the_format_says():
    about = {"format": 99, "payload": "evil", "arrays": {}, "crc32c": "00000000", "source": "x"}
    back = parse_entry(entry_document(EntryRecord({"a": 1}, {}, about)))
    assert (back.tree, back.about) == ({"a": 1}, {"source": "x"})


def changed(path, value) -> bytes:
    """The sample entry with one value changed and the checksum made right again."""
    document = json.loads(entry_document(entry()))
    *lead, last = path
    node = document
    for step in lead:
        node = node[step]
    assert last in node or isinstance(node, list) or path[-2] == "arrays"
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return sealed(document)


OWN = ("attributes", "zcache", "arrays")
ZARR = ("consolidated_metadata", "metadata")
BLOSC = ("codecs", 0, "configuration", "codecs", 1, "configuration")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("consolidated_metadata",), KeyError),
        (("consolidated_metadata",), None),
        (("attributes", "zcache", "payload"), KeyError),
        (OWN, KeyError),
        (OWN, [1]),
        ((*OWN, "cast"), None),
        ((*OWN, "cast", "shard_nbytes"), -1),
        ((*OWN, "cast", "shard_nbytes"), 10),
        ((*OWN, "cast", "shard_nbytes"), "x"),
        ((*OWN, "cast", "shard_nbytes"), float("inf")),
        ((*OWN, "cast", "seal"), KeyError),
        ((*OWN, "cast", "seal"), "0x"),
        ((*OWN, "cast", "index_crc32c"), 7),
        ((*OWN, "cast", "index_crc32c"), "xyz"),
        ((*OWN, "cast", "narrowing"), {}),
        ((*OWN, "cast", "narrowing", "kind"), "exec"),
        ((*OWN, "cast", "narrowing", "code_dtype"), "|u1"),
        ((*OWN, "identity", "narrowing", "dtype"), "<f8"),
        ((*OWN, "bytes", "narrowing", "dtype"), "O"),
        ((*OWN, "bytes", "narrowing", "dtype"), "nonsense"),
        ((*OWN, "bytes", "table"), KeyError),
        ((*OWN, "bytes", "table"), "AAAA"),
        ((*OWN, "bytes", "table"), "!"),
        ((*OWN, "affine", "narrowing", "levels"), 2**40),
        ((*OWN, "affine", "narrowing", "scale"), "nan"),
        ((*ZARR, "cast"), KeyError),
        ((*ZARR, "cast"), []),
        ((*ZARR, "cast", "data_type"), "object"),
        ((*ZARR, "cast", "data_type"), "uint8"),
        ((*ZARR, "cast", "shape"), []),
        ((*ZARR, "cast", "shape"), [1, 9, 8]),
        ((*ZARR, "cast", "shape"), [1, 9, 8, 0]),
        ((*ZARR, "cast", "shape"), [1, 9, 8, -7]),
        ((*ZARR, "cast", "shape"), [1, 9, 8, 7.0]),
        ((*ZARR, "cast", "shape"), [True, 9, 8, 7]),
        ((*ZARR, "cast", "shape"), "1987"),
        ((*ZARR, "cast", "fill_value"), 1),
        ((*ZARR, "cast", "node_type"), "group"),
        ((*ZARR, "cast", "storage_transformers"), [{"name": "x"}]),
        ((*ZARR, "cast", "chunk_grid", "configuration", "chunk_shape"), [1, 1, 1, 1]),
        ((*ZARR, "cast", "codecs", 0, "name"), "numcodecs.pickle"),
        ((*ZARR, "cast", "codecs", 0, "configuration", "index_location"), "start"),
        ((*ZARR, "cast", "codecs", 0, "configuration", "codecs", 0, "configuration", "endian"), "big"),
        ((*ZARR, "cast", *BLOSC, "cname"), "exotic"),
        ((*ZARR, "cast", *BLOSC, "clevel"), 77),
        ((*ZARR, "cast", *BLOSC, "shuffle"), "sideways"),
        ((*ZARR, "cast", *BLOSC, "typesize"), 1),
        ((*ZARR, "cast", *BLOSC, "blocksize"), 4096),
    ],
)
def test_documents_that_contradict_themselves_are_damage_even_with_a_valid_checksum(path, value):
    assert parse_entry(sealed(json.loads(entry_document(entry())))).tree == TREE
    if path[-1] == "storage_transformers":
        document = json.loads(entry_document(entry()))
        document["consolidated_metadata"]["metadata"]["cast"]["storage_transformers"] = value
        data = sealed(document)
    else:
        data = changed(path, value)
    with pytest.raises(EntryDamagedError):
        parse_entry(data)


def test_what_is_for_viewers_comes_back():
    record = entry_with_images()
    data = entry_document(record)
    back = parse_entry(data)
    assert {name: (a.axes, a.is_label) for name, a in back.arrays.items() if a.axes} == {
        "identity": ("cxyz", False),
        "cast": ("cxyz", True),
    }
    assert (back.ome, back.label_groups) == (record.ome, record.label_groups)
    assert entry_document(back) == data
    document = json.loads(data)
    assert list(document["attributes"]) == ["zcache", "ome"]
    metadata = document["consolidated_metadata"]["metadata"]
    assert set(metadata) == {*record.arrays, "labels", "labels/cast", "labels/cast/0"} - {"cast"}
    for path, ome in record.label_groups.items():
        assert metadata[path] == json.loads(group_document(ome))
        assert GroupMetadata.from_dict(dict(metadata[path])).attributes == {"ome": ome}
    found = ArrayV3Metadata.from_dict(json.loads(array_document(record.arrays["cast"])))
    assert found.dimension_names == ("c", "x", "y", "z")
    assert entry_document(entry()) == entry_document(parse_entry(entry_document(entry())))


ATTRIBUTES = ("attributes",)
IMAGE = ("attributes", "ome", "multiscales", 0)
GROUP = (*ZARR, "labels/cast", "attributes", "ome", "multiscales", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*OWN, "cast", "is_label"), False),
        ((*OWN, "cast", "is_label"), 1),
        ((*OWN, "cast", "is_label"), "../cast"),
        ((*OWN, "cast", "is_label"), KeyError),
        ((*OWN, "cast", "axes"), ""),
        ((*OWN, "cast", "axes"), KeyError),
        ((*OWN, "cast", "axes"), "xyz"),
        ((*OWN, "cast", "axes"), "cxyy"),
        ((*OWN, "cast", "axes"), "xyzc"),
        ((*OWN, "cast", "axes"), ["c", "x", "y", "z"]),
        ((*OWN, "identity", "is_label"), True),
        ((*OWN, "bytes", "axes"), "cxyz"),
        ((*OWN, "bytes", "is_label"), True),
        ((*ZARR, "identity", "dimension_names"), KeyError),
        ((*ZARR, "identity", "dimension_names"), ["c", "x", "z", "y"]),
        ((*ZARR, "labels/cast/0"), KeyError),
        ((*ZARR, "labels/cast"), KeyError),
        ((*ZARR, "labels/cast"), {}),
        ((*ZARR, "labels"), KeyError),
        ((*ZARR, "labels", "node_type"), "array"),
        ((*ZARR, "labels", "attributes", "ome", "labels"), []),
        ((*ZARR, "labels", "attributes", "ome", "labels"), ["../../cast"]),
        ((*ZARR, "more"), {}),
        ((*ZARR, "cast"), {}),
        ((*GROUP, "datasets", 0, "path"), "../../identity"),
        ((*GROUP, "axes", 1, "name"), "y"),
        ((*GROUP, "datasets"), []),
        ((*ATTRIBUTES, "ome"), KeyError),
        ((*ATTRIBUTES, "ome"), None),
        ((*ATTRIBUTES, "ome"), []),
        ((*IMAGE, "datasets", 0, "path"), "../identity"),
        ((*IMAGE, "datasets", 0, "path"), "bytes"),
        ((*IMAGE, "datasets"), []),
        ((*IMAGE, "axes", 0, "name"), 7),
    ],
)
def test_what_viewers_are_told_has_to_be_about_the_entrys_own_arrays(path, value):
    document = json.loads(entry_document(entry_with_images()))
    assert parse_entry(sealed(document)).tree == TREE
    *lead, last = path
    node = document
    for step in lead:
        node = node[step]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    with pytest.raises(EntryDamagedError):
        parse_entry(sealed(document))


@pytest.mark.parametrize("name", ["labels", "Labels"])
def test_no_array_lies_where_the_labels_do(name):
    plain, shown = entry(), entry_with_images()
    assert parse_entry(entry_document(replace(plain, arrays={name: plain.arrays["cast"]}))).tree == TREE
    both = replace(shown, arrays={**shown.arrays, name: plain.arrays["cast"]})
    with pytest.raises(EntryDamagedError):
        parse_entry(entry_document(both))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "", "..", "zarr.json", "c"])
def test_no_path_is_taken_from_a_document(name):
    document = json.loads(entry_document(entry()))
    for arrays in (document["attributes"]["zcache"]["arrays"], document["consolidated_metadata"]["metadata"]):
        arrays[name] = arrays["cast"]
    with pytest.raises(EntryDamagedError, match="it names an array"):
        parse_entry(sealed(document))


@pytest.mark.parametrize(
    ("shape", "chunk_shape"),
    [((1,) * 65, (1,) * 65), ((1, 2**40), (1, 2**40)), ((2**31,), (2**29 + 1,)), ((10**30,), (10**30,))],
)
def test_case_13_chunks_that_no_writer_makes_are_refused(shape, chunk_shape, monkeypatch):
    narrowing = Narrowing("identity", np.dtype("u1"), np.dtype("u1"))
    record = ArrayRecord(ChunkGrid(shape, chunk_shape), np.dtype("u1"), BloscCodec(), narrowing, 10**6, 0, 0)
    with monkeypatch.context() as m:
        m.setattr(layout, "MAX_ITEM_BYTES", 10**40)
        data = entry_document(EntryRecord(None, {"x": record}, {}))
    with pytest.raises(EntryDamagedError):
        parse_entry(data)


def test_deeply_nested_documents_are_damage():
    head = b'{"zarr_format":3,"node_type":"group","attributes":{"zcache":{"crc32c":"'
    tail = b'","format":1,"payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}}}"
    with pytest.raises(EntryDamagedError):
        parse_entry(head + b"%08x" % crc32c(tail) + tail)


def test_documents_are_ascii_and_hold_no_numbers_that_json_lacks():
    data = entry_document(EntryRecord({"name": "größe\ud800"}, {}, {}))
    assert data.isascii()
    assert parse_entry(data).tree == {"name": "größe\ud800"}
    with pytest.raises(ValueError):
        entry_document(EntryRecord({"x": float("nan")}, {}, {}))
