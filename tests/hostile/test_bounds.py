"""Bounds on what a forged entry may cost: each is stated in docs/security.md, and each bomb here tries to exceed one.

Every reading runs in a process of its own with a limit on memory and time, so that a bomb that goes off fails its test
and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numcodecs import blosc

from tests.hostile import forge
from tests.hostile.forge import Forged, Shard, array_metadata, made_up, narrowing, reference, with_payload
from tests.hostile.jail import MIB, Verdict, run
from zcache.encoding import array_layout, layout
from zcache.encoding.array_layout import shard_path
from zcache.encoding.layout import EntryRecord, entry_document, parse_entry
from zcache.encoding.payload import decode_item
from zcache.encoding.shard import BloscCodec, ShardIndex
from zcache.errors import EntryDamagedError, UnstorableError

KEY = f"{1:032x}"
U1 = narrowing("identity", "|u1", "|u1")
IDLE = 60 * MIB  # what the process takes that reads nothing, and some room
_READ = """
    import sys, time, warnings
    from zcache.cache import Cache
    cache = Cache(sys.argv[1])
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = cache.get(sys.argv[2], "a miss")
    print("a miss" if found is "a miss" else "an item", cache.stats.damaged, cache.stats.read_errors)
    print(*[str(w.message) for w in heard])
"""


@dataclass(frozen=True)
class Reading:
    """What came of reading an entry in a process of its own."""

    counted: str
    message: str
    verdict: Verdict

    @property
    def more_bytes(self) -> int:
        """Memory beyond that of an idle process."""
        return max(0, self.verdict.peak_bytes - IDLE)


def read(cache_dir: Path, **limits) -> Reading:
    verdict = run(_READ, cache_dir, KEY, **limits)
    assert verdict.how == "ended", verdict
    counted, _, message = verdict.out.partition("\n")
    return Reading(counted, message, verdict)


def entry_of(cache_dir: Path) -> Path:
    return cache_dir / "cache.zarr" / KEY


def left_out(n_chunks: int) -> Shard:
    """A shard without a single chunk: 16 bytes stand for each, whatever its size."""
    return Shard([b""] * n_chunks)


def claim(shape: list[int], chunk_shape: list[int], n_arrays: int = 1, **about: object) -> Forged:
    """An entry that claims arrays of nothing but the fill value."""
    n_chunks = int(np.prod([-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)], dtype=object))
    meta, names = array_metadata(shape, chunk_shape), [f"x{i}" for i in range(n_arrays)]
    arrays = {name: (meta, {**U1, **about}, left_out(n_chunks)) for name in names}
    return made_up(arrays, {name: reference(name, shape) for name in names})


# --- Arrays: how much they claim --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "n_arrays"),
    [
        ([1, 2**18, 2**19], [1, 2**14, 2**15], 1),  # 128 GiB in a file of 4 KB
        ([2**40], [2**29], 1),  # 1 TiB in 32 KB
        ([2**35], [2**29], 3),  # each within the bound, together not
        ([1], [2**29], 129),  # one voxel each, in chunks of 512 MiB
    ],
)
def test_arrays_that_claim_more_than_the_bound_are_refused_before_anything_is_allocated(
    tmp_path, shape, chunk_shape, n_arrays
):
    claim(shape, chunk_shape, n_arrays).write(entry_of(tmp_path))
    assert sum(p.stat().st_size for p in entry_of(tmp_path).rglob("*") if p.is_file()) < 200_000
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert f"{layout.MAX_ITEM_BYTES} at most" in reading.message
    assert reading.more_bytes == 0


def test_the_bound_is_64_gib_to_the_byte():
    def parse(extent: int) -> int:
        files = claim([extent], [2**29]).files()
        return parse_entry(files["zarr.json"]).arrays["x0"].grid.shape[0]

    assert parse(2**36) == 2**36
    with pytest.raises(EntryDamagedError, match=f"arrays of {2**36 + 2**29} bytes, {2**36} at most"):
        parse(2**36 + 1)


def test_what_no_reader_would_believe_no_writer_writes(monkeypatch):
    record = parse_entry(claim([1000, 70], [100, 70]).files()["zarr.json"])
    for name, limit, says in (
        ("MAX_ITEM_BYTES", 69_999, "70000 bytes, 69999 at most"),
        ("MAX_CHUNKS", 9, "10 chunks, 9 at most"),
        ("MAX_DOCUMENT_BYTES", 900, "bytes of JSON, 900 at most"),
    ):
        with monkeypatch.context() as m:
            m.setattr(layout, name, limit)
            with pytest.raises(UnstorableError, match=says):
                entry_document(record)
    assert parse_entry(entry_document(EntryRecord(record.tree, record.arrays, {}))).tree == record.tree


def test_an_array_of_the_fill_value_takes_its_own_size_and_no_more(tmp_path):
    size = 256 * MIB
    table = {**narrowing("table", "<f4", "|u1", entries=1), "table": "AADAPw=="}  # 1.5: memory that must be written
    metadata = array_metadata([size // 4], [2**20])
    tree = reference("x", [size // 4], "<f4")
    made_up({"x": (metadata, table, left_out(64))}, tree).write(entry_of(tmp_path))
    reading = read(tmp_path)
    assert reading.counted == "an item 0 0", reading.message
    assert size - 60 * MIB < reading.more_bytes < 1.1 * size


@pytest.mark.parametrize("cname", ["zstd", "lz4"])
def test_chunks_that_compress_to_nothing_take_twice_the_size_of_the_array_at_most(tmp_path, cname):
    size, chunk = 192 * MIB, 16 * MIB
    stream = BloscCodec(cname, 9, "noshuffle").compress(np.full(chunk, 7, np.uint8))
    metadata = array_metadata([size], [chunk])
    metadata["codecs"][0]["configuration"]["codecs"][1]["configuration"]["cname"] = cname
    shard = Shard([stream] * (size // chunk))
    frame = len(stream) + 4
    shard.table = np.array([[0, frame]] * len(shard.streams), np.uint64)  # one chunk, in every place
    made_up({"x": (metadata, U1, shard)}, reference("x", [size])).write(entry_of(tmp_path))
    reading = read(tmp_path)
    assert reading.counted == "an item 0 0", reading.message
    assert reading.more_bytes < 2 * size + chunk


def test_one_array_is_not_returned_any_number_of_times(tmp_path):
    size = 64 * MIB
    forged = claim([size], [size])
    forged.document["attributes"]["zcache"]["payload"] = [reference("x0", [size])] * 1000
    forged.write(entry_of(tmp_path))
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert "more than one place" in reading.message
    assert reading.more_bytes < 3 * size


# --- Shards: how long, and of how many chunks -------------------------------------------------------------------------


def test_a_shard_of_more_chunks_than_the_bound_is_refused_before_its_index_is_read(tmp_path):
    n = 2**20 + 1
    forged = claim([n], [1])
    forged.write(entry_of(tmp_path))
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert f"arrays of {n} chunks, {2**20} at most" in reading.message
    assert reading.more_bytes == 0


def test_a_chunk_costs_a_kilobyte_and_a_half_at_most_while_it_is_read(tmp_path):
    n = 2**17
    claim([n], [1]).write(entry_of(tmp_path))
    reading = read(tmp_path)
    assert reading.counted == "an item 0 0", reading.message
    assert reading.more_bytes < n * 1536


def test_a_sparse_file_is_not_read_as_one_chunk_of_a_terabyte(tmp_path):
    forged = claim([100], [100])
    forged.write(entry_of(tmp_path))
    shard = entry_of(tmp_path) / "x0" / shard_path(1)
    size = 2**40
    index = ShardIndex(np.array([[0, size - 24]], np.uint64)).encode()
    with shard.open("wb") as f:
        f.truncate(size - len(index))
        f.seek(size - len(index))
        f.write(index)
    document = json.loads((entry_of(tmp_path) / "zarr.json").read_bytes())
    about = {"shard_nbytes": size, "index_crc32c": index[-4:][::-1].hex()}
    document["attributes"]["zcache"]["arrays"]["x0"].update(about)
    (entry_of(tmp_path) / "zarr.json").write_bytes(forge.sealed(document))
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert "larger than its chunks could be" in reading.message
    assert reading.more_bytes == 0


def test_the_longest_shard_that_blosc_could_make_is_no_lie():
    noise = np.frombuffer(np.random.default_rng(0).bytes(1000), np.uint8)
    streams = [blosc.compress(noise, b"lz4", 5, 0)] * 3
    data, _, _ = Shard(streams).encode()
    assert len(data) == ShardIndex.max_shard_nbytes(3, 1000)


# --- Documents: how much text, and what becomes of it -----------------------------------------------------------------


def test_a_document_longer_than_the_bound_is_damage():
    data = with_payload('"' + "x" * layout.MAX_DOCUMENT_BYTES + '"')
    with pytest.raises(EntryDamagedError, match=f"{len(data)} bytes, 33554432 at most"):
        parse_entry(data)
    assert parse_entry(with_payload('"' + "x" * (layout.MAX_DOCUMENT_BYTES - 200) + '"')).tree[:2] == "xx"


WORST = {
    "lists": "[]",
    "dicts": "{}",
    "sets": '{"$set":[]}',
    "tuples of a list": '{"$tuple":[[]]}',
    "floats": "0.5",
    "dicts of one": '{"a":{}}',
    "ranges": '{"$range":[0,9]}',
    "arrays": '{"$ndarray":{"dtype":"|u1","shape":[0],"base64":""}}',
    "bytearrays": '{"$bytearray":""}',
}


@pytest.mark.parametrize("what", WORST)
def test_a_document_takes_64_times_its_size_at_most(tmp_path, what):
    text = WORST[what]
    n = MIB // 2 // (len(text) + 1)
    data = with_payload("[" + ",".join([text] * n) + "]")
    (folder := entry_of(tmp_path)).mkdir(parents=True)
    (folder / "zarr.json").write_bytes(data)
    reading = read(tmp_path)
    assert reading.counted == "an item 0 0", reading.message
    assert reading.more_bytes < 64 * len(data), reading.more_bytes / len(data)


@pytest.mark.parametrize("dtype", ["|S0", "<U0"])
def test_strings_without_a_character_do_not_become_memory(tmp_path, dtype):
    node = {"$ndarray": {"dtype": dtype, "shape": [2**20 + 1], "base64": ""}}
    (folder := entry_of(tmp_path)).mkdir(parents=True)
    (folder / "zarr.json").write_bytes(with_payload(json.dumps(node)))
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert "1048577 empty strings" in reading.message
    node["$ndarray"]["shape"] = [2**20]
    assert decode_item(node, {}.get).shape == (2**20,)


# --- Time -------------------------------------------------------------------------------------------------------------

_PRIME = 2**61 - 1  # Python hashes integers modulo this


@pytest.mark.parametrize(
    "tree",
    [
        {"$set": [i * _PRIME for i in range(200_000)]},
        {"$frozenset": [i * _PRIME for i in range(200_000)]},
        {"$dict": [[i * _PRIME, 0] for i in range(200_000)]},
        {"$ordereddict": [[{"$tuple": [i * _PRIME]}, 0] for i in range(200_000)]},
        {"$set": [float(2**61) * 2.0 ** (61 * (i % 14)) for i in range(200_000)]},
    ],
    ids=["set", "frozenset", "dict", "ordered", "equal"],
)
@pytest.mark.timeout(60)  # minutes to hours, were they all inserted
def test_members_that_share_one_hash_are_refused_in_linear_time(tree):
    with pytest.raises(EntryDamagedError, match="share one hash"):
        decode_item(tree, {}.get)


def test_a_few_members_may_share_a_hash():
    members = [i * _PRIME for i in range(64)]
    assert decode_item({"$set": members}, {}.get) == set(members)
    assert decode_item({"$set": list(range(100_000))}, {}.get) == set(range(100_000))
    assert len(decode_item({"$dict": [[-1, "a"], [-2, "b"]]}, {}.get)) == 2


SLOW = {
    "a dtype of a million fields": '{"$dtype":"' + "f8," * 10**6 + '"}',
    "an array of a million fields": '{"$ndarray":{"dtype":"' + "f8," * 10**6 + '","shape":[1],"base64":""}}',
    "an integer of ten million digits": "1" * 10**7,
    "a negative integer of ten million digits": "-" + "9" * 10**7,
    "a list ten thousand levels deep": "[" * 10**4 + "]" * 10**4,
    "tuples ten thousand levels deep": '{"$tuple":[' * 10**4 + "]}" * 10**4,
    "dicts ten thousand levels deep": '{"a":' * 10**4 + "1" + "}" * 10**4,
    "text that is no JSON": "[" * 10**6,
    "a class ten million levels deep": '{"$enum":["os","' + "a." * 10**6 + '","b"]}',
    "a float of ten million digits": '{"$float":"' + "0" * 10**7 + '"}',
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SLOW)
def test_values_that_take_long_to_read_are_refused_quickly(what):
    data = with_payload(SLOW[what])
    with pytest.raises(EntryDamagedError) as e:
        decode_item(parse_entry(data).tree, {}.get)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1." + "1" * 10**7, 1 + 1 / 9),
        ("0." + "0" * 10**7 + "1", 0.0),
        ('{"$int":"0x' + "f" * 10**6 + '"}', 16 ** (10**6) - 1),
        ('{"$range":[0,' + "9" * 4000 + "]}", range(int("9" * 4000))),
    ],
    ids=["long float", "small float", "long integer", "long range"],
)
def test_long_numbers_that_are_valid_are_read_in_linear_time(text, value):
    assert decode_item(parse_entry(with_payload(text)).tree, {}.get) == value


def test_a_message_about_a_forged_entry_is_short_and_has_no_control_characters():
    evil = "\x1b[2J\n" * 1000
    trees = [
        {"$" + evil: 1},
        {"$enum": [evil, evil, evil]},
        {"$dtype": evil},
        {"$ndarray": {"dtype": evil, "shape": [1], "base64": ""}},
        {"$path": [evil, "x"]},
        {"$int": evil},
        {"$ndarray": {"dtype": "<f4", "shape": [evil], "base64": ""}},
    ]
    for tree in trees:
        with pytest.raises(EntryDamagedError) as e:
            decode_item(tree, {}.__getitem__)
        assert len(str(e.value)) < 400
        assert "\x1b" not in str(e.value)
        assert "\n" not in str(e.value)
    for document in ({"format": evil}, {"arrays": {evil: {}}}, {"arrays": {"x": {"narrowing": {"kind": evil}}}}):
        forged = claim([8], [8])
        forged.document["attributes"]["zcache"] |= document
        with pytest.raises(EntryDamagedError) as e:
            parse_entry(forge.sealed(forged.document))
        assert len(str(e.value)) < 400
        assert "\x1b" not in str(e.value)


def test_the_stated_bounds_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for value in ("64 GiB", "32 MiB", "512 MiB", "1,048,576"):
        assert value in text
    assert (layout.MAX_ITEM_BYTES, layout.MAX_DOCUMENT_BYTES) == (64 * 2**30, 32 * 2**20)
    assert (array_layout.MAX_CHUNK_BYTES, layout.MAX_CHUNKS) == (512 * 2**20, 1_048_576)


# --- Not mended yet: in the storage room ------------------------------------------------------------------------------


def test_a_sparse_document_of_any_length_is_not_read(tmp_path):
    (folder := entry_of(tmp_path)).mkdir(parents=True)
    with (folder / "zarr.json").open("wb") as f:
        f.write(forge.HEAD)
        f.truncate(2**28)
    reading = read(tmp_path)
    assert reading.counted == "a miss 1 0"
    assert reading.more_bytes == 0


def test_documents_kept_open_take_a_bounded_amount_of_memory(tmp_path):
    n, size, kept = 32, MIB // 2, 8 * MIB
    data = with_payload("[" + ",".join(["[]"] * (size // 3)) + "]")
    for i in range(n):
        (folder := tmp_path / "cache.zarr" / f"{i:032x}").mkdir(parents=True)
        (folder / "zarr.json").write_bytes(data)
    code = """
        import sys
        from zcache.cache import Cache
        cache = Cache(sys.argv[1])
        for i in range(int(sys.argv[2])):
            cache.get(f"{i:032x}")
        print(cache.stats.hits)
    """
    verdict = run(code, tmp_path, n, memory=4096 * MIB)
    assert (verdict.how, verdict.out) == ("ended", str(n))
    assert verdict.peak_bytes - IDLE < 32 * kept  # parsed, not decoded: that is 24 times as much at most


def test_the_harness_sees_a_crash_a_hang_and_too_much_memory():
    assert run("import os; os.kill(os.getpid(), 11)").how == "SIGSEGV"
    assert run("while True: pass", timeout=1).how == "hung"
    assert run("b'x' * 2**32").how == "failed 1"
    verdict = run("x = b'x' * (300 * 2**20); print('done')")
    assert (verdict.how, verdict.out) == ("ended", "done")
    assert 300 * MIB < verdict.peak_bytes < 400 * MIB
