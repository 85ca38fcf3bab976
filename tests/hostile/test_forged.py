"""Forged entries with every checksum right: any item or a counted miss, and no exception, crash or hang.

In a process of its own, since what is looked for may kill it: the decoder is C code that reads what a forger wrote.
"""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from tests.hostile import mutations as m
from tests.hostile.jail import MIB, run
from tests.hostile.trial import forged_chunk, forged_document, forged_index, forged_payload, forged_text
from zcache.encoding.payload import decode_item
from zcache.encoding.shard import BloscCodec, crc32c, decode_chunk
from zcache.errors import EntryDamagedError
from zcache.training.leaves import torch_leaf_codecs

N_FORGERIES = 400
N_STREAMS = 8_000
HEADER = struct.Struct("<BBBBIII")
FORMATS = {"blosclz": 0, "lz4": 1, "lz4hc": 1, "zlib": 3, "zstd": 4}

_ATTACK = """
    import collections, json, pathlib, sys
    from tests.hostile import mutations as m, trial as t
    trial = t.Trial(pathlib.Path(sys.argv[1]))
    counts = {}
    for name in sys.argv[3:]:
        attack = next(a for a in t.FORGERIES if a.__name__ == name)
        counts[name] = collections.Counter()
        for seed in range(int(sys.argv[2])):
            try:
                counts[name][t.attempt(trial, attack, m.SeededDice(seed)).value] += 1
            except BaseException:
                print(name, "seed", seed, file=sys.stderr)
                raise
    trial.write({})
    assert trial.read() is t.Outcome.RIGHT
    print(json.dumps(counts))
"""


@pytest.mark.parametrize(
    "attacks", [(forged_document, forged_text, forged_payload), (forged_chunk, forged_index)], ids=["json", "bytes"]
)
def test_forged_entries_are_items_or_counted_misses(tmp_path, attacks, tally):
    names = [attack.__name__ for attack in attacks]
    verdict = run(_ATTACK, tmp_path, N_FORGERIES, *names, memory=6144 * MIB, timeout=120)
    assert verdict.how == "ended", verdict.err[-3000:]
    for name, counts in json.loads(verdict.out).items():
        assert sum(counts.values()) == N_FORGERIES
        assert counts["counted miss"] > N_FORGERIES // 4, name
        for what, n in counts.items():
            tally[f"forged entries: {what}"] += n


_STREAMS = """
    import collections, itertools, json, sys
    import numpy as np
    from tests.hostile import mutations as m
    from zcache.encoding.shard import BloscCodec, crc32c, decode_chunk
    from zcache.errors import EntryDamagedError
    rng = np.random.default_rng(0)
    shapes, types = ((40,), (64, 64), (8, 50, 50)), ("u1", "i2", "f8")
    chunks = [rng.normal(0, 20, shape).astype(t) for shape in shapes for t in types]
    codecs = [BloscCodec(sys.argv[1], 5, s) for s in ("noshuffle", "shuffle", "bitshuffle")]
    bases = [(codec.compress(chunk), chunk) for chunk in chunks for codec in codecs]
    counts = collections.Counter()
    for seed in range(int(sys.argv[2])):
        dice = m.SeededDice(seed)
        stream, chunk = m.one_of(dice, bases)
        data = m.changed_stream(stream, dice, plausible=dice.below(8) > 0)
        frame = np.frombuffer(data + crc32c(data).to_bytes(4, "little"), np.uint8)
        guarded = np.full(chunk.nbytes + 128, 0xA5, np.uint8)
        out = guarded[64:-64].view(chunk.dtype).reshape(chunk.shape)
        try:
            decode_chunk(frame, out)
            counts["decoded"] += 1
        except EntryDamagedError:
            counts["refused"] += 1
        assert (guarded[:64] == 0xA5).all() and (guarded[-64:] == 0xA5).all(), f"seed {seed} wrote beyond the chunk"
    print(json.dumps(counts))
"""


@pytest.mark.parametrize("cname", ["lz4", "zstd", "blosclz", "zlib"])
def test_forged_streams_neither_crash_the_decoder_nor_make_it_write_beyond_the_chunk(cname, tally):
    verdict = run(_STREAMS, cname, N_STREAMS, memory=1024 * MIB, timeout=120)
    assert verdict.how == "ended", verdict.err[-3000:]
    counts = json.loads(verdict.out)
    assert sum(counts.values()) == N_STREAMS
    assert counts["refused"] > N_STREAMS // 10
    assert verdict.peak_bytes < 128 * MIB
    for what, n in counts.items():
        tally[f"forged streams: {what}"] += n


def frame(header: list[int], body: bytes) -> np.ndarray:
    data = HEADER.pack(*header) + body
    return np.frombuffer(data + crc32c(data).to_bytes(4, "little"), np.uint8)


@pytest.mark.parametrize("cname", FORMATS)
@pytest.mark.parametrize("shuffle", ["noshuffle", "shuffle", "bitshuffle"])
def test_the_decoder_sees_no_header_that_this_chunk_could_not_have(cname, shuffle, monkeypatch):
    seen = []
    monkeypatch.setattr(blosc, "decompress", lambda data, out: seen.append(bytes(data[:16])))
    codec = BloscCodec(cname, 5, shuffle)
    chunk = np.arange(6000, dtype="<i2").reshape(60, 100)
    data = codec.compress(chunk)
    true = list(HEADER.unpack(data[:16]))
    out = np.empty_like(chunk)
    values = {
        0: range(256),
        1: range(256),
        2: range(256),
        3: range(256),
        4: [*range(0, 20000, 97), 11999, 12000, 12001, 2**31, 2**32 - 1],
        5: [*range(20), 11999, 12000, 12001, 2**31 - 1, 2**31, 2**32 - 1],
        6: [0, 15, 16, len(data) - 1, len(data), len(data) + 1, 2**31, 2**32 - 1],
    }
    for place, candidates in values.items():
        passed = []
        for value in candidates:
            header = [*true[:place], value, *true[place + 1 :]]
            seen.clear()
            try:
                decode_chunk(frame(header, data[16:]), out, codec)
            except EntryDamagedError:
                assert not seen
            else:
                assert seen == [HEADER.pack(*header)]
                passed.append(value)
        if place == 2:  # bits 1 and 4 say how blocks are stored and split; either is decoded
            shuffled = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 4}[shuffle]
            flags = {FORMATS[cname] << 5 | s | more for s in {0, shuffled} for more in (0, 2, 16, 18)}
            assert set(passed) == flags
        elif place == 5:
            assert passed == [v for v in candidates if 1 <= v <= chunk.nbytes]
        else:
            assert passed == [true[place]]


def test_without_a_codec_any_of_the_known_compressors_will_do():
    chunk = np.arange(6000, dtype="<i2")
    for cname in FORMATS:
        out = np.empty_like(chunk)
        data = BloscCodec(cname, 5, "shuffle").compress(chunk)
        decode_chunk(frame(list(HEADER.unpack(data[:16])), data[16:]), out)
        assert out.tobytes() == chunk.tobytes()
    data = BloscCodec("lz4", 5, "shuffle").compress(chunk)
    header = list(HEADER.unpack(data[:16]))
    header[2] = 2 << 5 | 1  # snappy
    with pytest.raises(EntryDamagedError, match="another compressor or shuffle"):
        decode_chunk(frame(header, data[16:]), np.empty_like(chunk))


def trees() -> st.SearchStrategy:
    bodies = st.recursive(
        st.one_of(st.sampled_from(m.SCALARS), st.integers(), st.floats(), st.text(max_size=9)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from(m.TAGS), inner, min_size=1, max_size=1),
            st.dictionaries(st.sampled_from(["a", "dtype", "shape", "base64", "array", "data", "meta"]), inner),
        ),
        max_leaves=12,
    )
    return st.dictionaries(st.sampled_from(m.TAGS), bodies, min_size=1, max_size=1)


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(trees())
def test_any_tree_is_an_item_or_damage(tally, tree):
    tally["forged payload trees"] += 1
    with contextlib.suppress(EntryDamagedError):
        decode_item(tree, {}.__getitem__, torch_leaf_codecs())
