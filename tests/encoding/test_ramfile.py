"""Files of items in memory: what is laid out is read back, and nothing that contradicts itself is believed."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import CORE, SHAPES, random_array
from zcache.encoding import ramfile
from zcache.encoding.narrowing import Narrowing, narrow
from zcache.encoding.ramfile import HEAD_NBYTES, parse_head, parse_ram_file, plan_ram_file
from zcache.encoding.restoring import restore
from zcache.encoding.rows import contiguous
from zcache.encoding.shard import crc32c
from zcache.errors import EntryDamagedError, UnstorableError


def written(plan, codes):
    data = bytearray(plan.nbytes)
    for start, piece in plan.pieces:
        data[start : start + len(piece)] = piece
    for name, array in plan.file.arrays.items():
        data[array.start : array.start + array.nbytes] = codes[name].tobytes()
    return data


def one_file(tree=None, **arrays):
    narrowed = {name: narrow(np.ascontiguousarray(array)) for name, array in arrays.items()}
    plan = plan_ram_file(tree or {"x": 1}, [(n, codes.shape, how) for n, (codes, how) in narrowed.items()])
    return written(plan, {n: codes for n, (codes, _) in narrowed.items()})


def windowed(shape=(1, 20, 30, 40)):
    return (np.random.default_rng(0).integers(0, 300, shape) / np.float32(299)).astype("f4")


@given(
    st.lists(
        st.tuples(st.sampled_from(CORE), st.sampled_from([s for s in SHAPES if s and 0 not in s]), st.integers(0, 9)),
        max_size=4,
    )
)
def test_every_bit_comes_back(parts):
    arrays = {f"a{i}": random_array(*part) for i, part in enumerate(parts)}
    data = one_file({"tree": [1, "ä", None]}, **arrays)
    found = parse_ram_file(data, len(data))
    assert found.tree == {"tree": [1, "ä", None]}
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].start % 64 == 0
        values = restore(found.arrays[name].codes(data), found.arrays[name].narrowing)
        assert (values.dtype, values.shape, values.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_tables_lie_beside_the_codes_and_outlive_the_mapping():
    array = windowed()
    data = one_file(image=array)
    image = parse_ram_file(data, len(data)).arrays["image"]
    assert image.narrowing.kind == "table"
    assert image.narrowing.table is not None
    assert len(image.narrowing.table) == 300
    codes = image.codes(bytes(data))
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(restore(codes, image.narrowing), array)


def test_a_file_is_as_large_as_it_says_and_its_codes_are_narrow():
    data = one_file(image=np.arange(20000.0).reshape(2, 100, 100))
    assert parse_head(data, len(data))[0] < 300
    assert len(data) < 20000 * 2 + 512


@pytest.mark.parametrize(
    "change", [lambda d: d[:0], lambda d: d[:63], lambda d: d[:64], lambda d: d[:-1], lambda d: d + b"x"]
)
def test_a_file_that_was_cut_short_or_lengthened_is_not_believed(change):
    other = change(bytes(one_file(image=windowed())))
    with pytest.raises(EntryDamagedError):
        parse_ram_file(other, len(other))


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_flipped_bit_in_head_or_document_is_noticed(place, flip):
    data = one_file(image=windowed())
    n_checked = HEAD_NBYTES + parse_head(data, len(data))[0]
    place %= n_checked
    if 36 <= place < HEAD_NBYTES:  # between the head's fields and the document: nothing
        return
    data[place] ^= flip
    with pytest.raises(EntryDamagedError):
        parse_ram_file(data, len(data))


def forged(change):
    """Return a file whose document was changed and given the right checksum."""
    data = one_file(image=windowed())
    nbytes, _ = parse_head(data, len(data))
    document = json.loads(data[HEAD_NBYTES : HEAD_NBYTES + nbytes])
    change(document)
    text = json.dumps(document, separators=(",", ":")).encode().ljust(nbytes)[:nbytes]
    data[HEAD_NBYTES : HEAD_NBYTES + nbytes] = text
    struct.pack_into("<QQI", data, 16, len(data), nbytes, crc32c(bytes(text)))
    return data


FORGERIES = {
    "no arrays": lambda d: d.pop("arrays"),
    "a list": lambda d: d.update(arrays=[]),
    "no shape": lambda d: d["arrays"]["image"].pop("shape"),
    "negative": lambda d: d["arrays"]["image"].update(shape=[-1, 2]),
    "huge": lambda d: d["arrays"]["image"].update(shape=[2**60]),
    "beyond": lambda d: d["arrays"]["image"].update(shape=[1, 99, 30, 40]),
    "start": lambda d: d["arrays"]["image"].update(start=2**62),
    "crooked": lambda d: d["arrays"]["image"].update(start=3),
    "table": lambda d: d["arrays"]["image"].update(table=2**40),
    "entries": lambda d: d["arrays"]["image"]["narrowing"].update(entries=-1),
    "dtype": lambda d: d["arrays"]["image"]["narrowing"].update(dtype="O"),
    "name": lambda d: d["arrays"].update({"../x": d["arrays"].pop("image")}),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_documents_that_contradict_themselves_are_refused(how):
    data = forged(FORGERIES[how])
    with pytest.raises(EntryDamagedError):
        parse_ram_file(data, len(data))


def test_a_document_is_bounded(monkeypatch):
    monkeypatch.setattr(ramfile, "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(UnstorableError, match="100 at most"):
        plan_ram_file({"x": "y" * 100}, [])


@given(st.integers(0, 3), st.data())
def test_boxes_are_copied_as_numpy_would(ndim, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=ndim + 1, max_size=ndim + 1))
    array = (
        np.random.default_rng(0).integers(0, 99, shape).astype(data.draw(st.sampled_from(["u1", "u2", "f4", "c16"])))
    )
    box = []
    for n in shape:
        start = data.draw(st.integers(0, n))
        box.append(slice(start, data.draw(st.integers(start, n))))
    copied = contiguous(array[tuple(box)])
    np.testing.assert_array_equal(copied, array[tuple(box)])
    assert copied.flags.c_contiguous
    assert copied.flags.writeable
    assert not np.shares_memory(copied, array)


def test_identity_narrowings_need_no_table():
    how = Narrowing("identity", np.dtype("f4"), np.dtype("f4"))
    plan = plan_ram_file({}, [("a", (3,), how)])
    assert len(plan.pieces) == 2
