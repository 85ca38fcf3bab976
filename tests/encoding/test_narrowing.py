"""Narrowing: every bit back when lossless, every value within the verified error otherwise."""

import itertools
import json
import math
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zcache.encoding import lookup, restoring
from zcache.encoding.lookup import BLOCK, bit_view, find_table, spread_sample, total_order
from zcache.encoding.narrowing import LOSSLESS, Narrowing, Precision, from_json, narrow, to_json
from zcache.encoding.restoring import restore
from zcache.errors import CacheConfigError, EntryDamagedError, UnstorableError

DATA = Path(__file__).parents[3] / "shared" / "data"
NUMBERS = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
FLOATS = ("f2", "f4", "f8")
LOSSY = (1e-4, 0.25, "float16", "uint8", "uint16")
PRECISIONS = ("lossless", *LOSSY)
TINY = {"f2": 6e-8, "f4": 1e-45, "f8": 5e-324}


def rng(seed=0):
    return np.random.default_rng(seed)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def round_trip(array, precision="lossless"):
    """Narrow and restore through JSON; check all that holds for every array; return (restored, narrowing)."""
    before = array.tobytes()
    codes, narrowing = narrow(array, Precision.parse(precision))
    assert array.tobytes() == before
    assert codes.flags.c_contiguous
    assert codes.shape == array.shape
    assert codes.dtype == narrowing.code_dtype
    assert narrowing.dtype == array.dtype
    assert narrowing.kind == "identity" or codes.itemsize < array.itemsize
    again = from_json(json.loads(json.dumps(to_json(narrowing))), narrowing.table)
    restored = restore(codes, again)
    assert same_bits(restored, restore(codes, narrowing))
    lut = narrowing.lut()
    assert (lut is None) == (narrowing.kind in {"identity", "cast"})
    if lut is not None:
        assert same_bits(lut[codes].astype(array.dtype).reshape(array.shape), restored)
    if precision == "lossless":
        assert same_bits(restored, array)
        assert narrowing.max_abs_error == 0
    return restored, narrowing


def check_lossy(array, precision):
    restored, narrowing = round_trip(array, precision)
    finite = np.isfinite(array)
    error = np.abs(restored[finite].astype("f8") - array[finite].astype("f8")).max(initial=0)
    assert error == narrowing.max_abs_error
    if isinstance(precision, float):
        assert error <= precision
        assert same_bits(restored[~finite], array[~finite])
    nan = np.isnan(array)
    assert (np.isnan(restored) == nan).all()
    assert same_bits(restored[~finite & ~nan], array[~finite & ~nan])
    return restored, narrowing


def floats_of(bits, dtype):
    return np.array(bits, f"u{dtype[1]}").view(dtype)


# --- lossless ---------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_array_keeps_every_bit(data):
    dtype = data.draw(st.sampled_from(NUMBERS))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
    values = data.draw(hnp.arrays(dtype, shape, fill=st.nothing() if data.draw(st.booleans()) else None))
    round_trip(values)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bit_patterns_repeated_keep_every_bit(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    word = int(dtype[1]) * 8
    patterns = data.draw(st.lists(st.integers(0, 2**word - 1), min_size=1, max_size=300))
    repeats = data.draw(st.integers(1, 40))
    array = np.tile(floats_of(patterns, dtype), repeats)
    round_trip(rng(repeats).permutation(array))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_integral_floats_keep_every_bit(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    low = data.draw(st.sampled_from([0, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1]))
    high = data.draw(st.sampled_from([0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**53]))
    array = np.array(data.draw(st.lists(st.integers(low, high), min_size=1, max_size=50)), "f8")
    with np.errstate(over="ignore"):
        array = array.astype(dtype)
    for precision in PRECISIONS:
        restored, _ = round_trip(array, precision)
        assert same_bits(restored, array)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "codes"),
    [
        ("i2", 0, 255, "u1"),
        ("i2", -1, 127, "i1"),
        ("i2", -1, 128, "i2"),
        ("u2", 0, 256, "u2"),
        ("i4", 0, 65535, "u2"),
        ("i4", -32768, 32767, "i2"),
        ("i8", -(2**31), 0, "i4"),
        ("i8", 0, 2**32 - 1, "u4"),
        ("u8", 0, 2**64 - 1, "u8"),
        ("u8", 0, 2**63, "u8"),
        ("i8", -(2**63), 2**63 - 1, "i8"),
        ("i1", -1, 1, "i1"),
        ("u1", 0, 1, "u1"),
        ("?", 0, 1, "?"),
        ("f2", 0, 255, "u1"),
        ("f2", -128, 127, "i1"),
        ("f4", 0, 255, "u1"),
        ("f4", -1, 1, "i1"),
        ("f4", 0, 65535, "u2"),
        ("f4", -32768, 32767, "i2"),
        ("f8", 0, 65536, "u4"),
        ("f8", -(2**31), 2**31 - 1, "i4"),
        ("f8", 0, 2**32 - 1, "u4"),
    ],
)
def test_smallest_integer(dtype, low, high, codes):
    array = np.array([[low, high]] * 3, dtype)
    _, narrowing = round_trip(array)
    assert narrowing.code_dtype == codes
    assert narrowing.kind == ("identity" if dtype == codes else "cast")


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_zero_dimensional_and_empty(dtype, precision):
    round_trip(np.array(1, dtype), precision)
    for shape in ((0,), (3, 0, 2)):
        round_trip(np.empty(shape, dtype), precision)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_12_minus_zero_and_nan_payloads(dtype):
    word = int(dtype[1]) * 8
    sign, inf = 1 << (word - 1), int(np.array(np.inf, dtype).view(f"u{dtype[1]}"))
    odd = floats_of([sign, inf | 1, inf | 2, sign | inf | 5, sign | inf, inf, 1, sign | 1], dtype)
    plain = np.zeros(3 * BLOCK + 11, dtype)
    for place, value in itertools.product((0, plain.size // 2, plain.size - 1), odd):
        array = plain.copy()
        array[place] = value
        _, narrowing = round_trip(array)
        assert narrowing.kind == "table"
        assert narrowing.code_dtype == np.uint8
        assert same_bits(round_trip(array, 1e-12)[0], array)
    array[: odd.size] = odd
    assert round_trip(array)[1].table.size == odd.size + 1
    for value in odd:
        round_trip(np.full((5, 7), value))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("entries", [255, 256, 257, 65_535, 65_536, 65_537])
def test_number_of_distinct_values(dtype, entries):
    n = 8 * 65_536
    values = np.sort(rng(1).standard_normal(entries + 999).astype(dtype))
    values = np.unique(values)[:entries]
    array = rng(2).permutation(np.resize(values, n)).reshape(64, 128, 64)
    _, narrowing = round_trip(array)
    if entries > 65_536:
        assert narrowing.kind == "identity"
        return
    assert narrowing.kind == "table"
    assert narrowing.code_dtype == ("u1" if entries <= 256 else "u2")
    assert narrowing.table.size == entries
    assert same_bits(narrowing.table, values)


@pytest.mark.parametrize("entries", [256, 257])
def test_float16_gets_byte_codes_or_none(entries):
    values = (np.arange(entries) / 512).astype("f2")
    _, narrowing = round_trip(np.resize(values, 100_000))
    assert narrowing.kind == ("table" if entries == 256 else "identity")


@pytest.mark.parametrize(("common", "rare"), [(5, 4), (200, 100), (250, 6), (250, 7), (300, 60_000), (5_000, 60_000)])
def test_rare_values_that_the_sample_does_not_see(common, rare):
    n = 600_000
    values = np.unique(rng(3).random(common + rare + 2_000, "f4"))
    values = rng(4).permutation(values)[: common + rare]
    array = np.resize(values[:common], n)
    array[rng(5).permutation(n)[:rare]] = values[common:]
    _, narrowing = round_trip(array)
    fits = common + rare <= 65_536
    assert narrowing.kind == ("table" if fits else "identity")
    if fits:
        assert same_bits(narrowing.table, np.sort(values))


def test_values_that_only_one_end_holds():
    array = np.zeros(40 * BLOCK, "f4")
    array[-BLOCK:] = rng().random(BLOCK)
    _, narrowing = round_trip(array)
    assert narrowing.kind == "table"
    assert narrowing.table.size == np.unique(array).size


def test_a_column_that_a_plain_stride_would_see_alone():
    rows = np.linspace(0, 1, 1 << 10, dtype="f4") * np.float32(0.7)
    array = np.ascontiguousarray(np.broadcast_to(rows, (1 << 10, 1 << 10)))
    sample = spread_sample(array.reshape(-1), 1 << 10)
    assert np.unique(sample).size > 500
    assert round_trip(array)[1].table.size == 1 << 10


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_arrays_that_fit_are_not_refused_by_the_sample(power):
    weights = np.arange(1, 60_001) ** -power
    picks = np.searchsorted(np.cumsum(weights / weights.sum()), rng(6).random(1_000_000) * 0.999999)
    array = (picks / np.float64(7)).astype("f4")
    _, narrowing = round_trip(array)
    assert narrowing.kind == "table"


def test_true_floats_are_refused_by_the_sample_alone(monkeypatch):
    def encode(self, bits):
        raise AssertionError("the whole array was searched")

    monkeypatch.setattr(lookup._PatternIndex, "encode", encode)
    air = rng(7).random(2_000_000) < 0.7
    for distinct in (400_000, 800_000):
        array = rng(8).integers(0, distinct, air.size).astype("f4") / np.float32(distinct)
        assert find_table(array) is None
        array[air] = 0
        assert find_table(array) is None


def test_tables_pay_or_are_not_used():
    small = rng().random(40, "f4")
    assert round_trip(small)[1].kind == "identity"
    assert round_trip(np.resize(small, 400))[1].kind == "table"
    # 30,000 distinct values of 70,000: uint16 codes and the table would be larger than the floats.
    assert round_trip(np.resize(rng().random(30_000, "f4"), 70_000))[1].kind == "identity"


def test_colliding_patterns_are_stored_otherwise_or_exactly(monkeypatch):
    # All patterns in one slot: more levels than allowed, so the search gives up and the array stays as it is.
    monkeypatch.setattr(lookup._Level, "slots", lambda self, patterns: np.zeros(patterns.shape, np.intp))
    assert find_table(np.resize(rng().random(100, "f4"), 10_000)) is None
    monkeypatch.undo()
    monkeypatch.setattr(lookup, "_MIN_SLOT_BITS", 4)
    monkeypatch.setattr(lookup, "_SLOTS_PER_PATTERN_BITS", 0)
    assert round_trip(np.resize(rng().random(3_000, "f4"), 200_000))[1].table.size == 3_000


def test_table_is_in_total_order():
    values = floats_of(
        [0xFFC00001, 0xFFC00000, 0xFF800000, 0xC0000000, 0x80000001, 0x80000000, 0, 1, 0x3F800000, 0x7F800000,
         0x7FC00000, 0x7FC00001], "f4"
    )  # fmt: skip
    assert (np.diff(total_order(bit_view(values)).astype("i8")) > 0).all()
    _, narrowing = round_trip(rng().permutation(np.resize(values, 1_000)))
    assert same_bits(narrowing.table, values)


def test_float64_that_is_float32():
    array = rng().random((300, 400), "f4").astype("f8")
    _, narrowing = round_trip(array)
    assert (narrowing.kind, narrowing.code_dtype) == ("cast", "f4")
    array[0, 7], array[200, 3] = np.nan, -0.0
    assert round_trip(array)[1].code_dtype == "f4"
    for spoiler in (0.1, 1e300, 1e-40, floats_of([0x7FF0000000000001], "f8")[0]):
        array[299, 399] = spoiler
        assert round_trip(array)[1].kind == "identity"


@pytest.mark.parametrize("dtype", ["c8", "c16", "?", "i1", "u1"])
def test_kept_as_they_are(dtype):
    array = rng().integers(0, 2, (4, 5)).astype(dtype)
    for precision in PRECISIONS:
        codes, narrowing = narrow(array, Precision.parse(precision))
        assert codes is array
        assert narrowing.kind == "identity"


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 6), "f4").T, np.zeros(8, "f4")[::2], np.zeros(3, ">f4"), np.zeros(3, "U2"), np.zeros(3, "O")],
)
def test_other_layouts_and_dtypes_are_refused(array):
    with pytest.raises(UnstorableError, match="C-contiguous"):
        narrow(array)


def test_scratch_memory_stays_small():
    n = 4_000_000
    values = {
        "table": np.resize(rng().random(5_000, "f4"), n),
        "floats": rng().random(n, "f4"),
        "integral": np.resize(np.arange(200, dtype="f4"), n),
        "float32": rng().random(n, "f4").astype("f8"),
    }
    for array, precision in itertools.product(values.values(), map(Precision.parse, ("lossless", 1e-3, "float16"))):
        tracemalloc.start()
        codes, narrowing = narrow(array, precision)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        restored = restore(codes, narrowing)
        restore_peak = tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
        assert peak - (0 if codes is array else codes.nbytes) < 4e6
        assert restore_peak - restored.nbytes < 2e6


# --- lossy ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_lossy_bounds_hold_for_any_floats(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    width = int(dtype[1]) * 8
    within = st.one_of(
        st.floats(-2, 2, width=width),
        st.floats(-3e4, 3e4, width=width),
        st.floats(width=width),
        st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, TINY[dtype], -TINY[dtype]]),
    )
    values = data.draw(st.lists(within, min_size=1, max_size=60))
    bound = data.draw(st.one_of(st.floats(1e-9, 10), st.floats(5e-324, 1e300)))
    for precision in (*LOSSY, bound):
        check_lossy(np.array(values, dtype), precision)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (-3.7, 9.1), (100, 101), (-5, -4), (-1, 0)])
@pytest.mark.parametrize("bound", [1e-4, 1e-3, 3e-2])
def test_absolute_bound_gives_small_codes(dtype, low, high, bound):
    array = rng().uniform(low, high, (50, 60, 70)).astype(dtype)
    array[0, 0, :2] = low, high
    restored, narrowing = check_lossy(array, bound)
    levels = (high - low) / (2 * bound)
    assert narrowing.kind == "affine"
    assert narrowing.code_dtype == ("u1" if levels < 250 else "u2")
    assert narrowing.max_abs_error > 0.7 * bound
    if low <= 0 <= high:
        array[5, 5] = 0
        restored, _ = check_lossy(array, bound)
        assert (restored[5, 5] == 0).all()


@pytest.mark.parametrize("precision", ["uint8", "uint16"])
def test_levels_over_the_own_range(precision):
    for low, high in ((0, 1), (-1, 2), (5, 6), (-4, 0)):
        array = rng().uniform(low, high, (60, 60, 60)).astype("f4")
        array[0, 0, :2] = low, high
        restored, narrowing = check_lossy(array, precision)
        assert (narrowing.kind, narrowing.code_dtype) == ("affine", precision)
        levels = {"uint8": 254, "uint16": 65_534}[precision]
        assert narrowing.max_abs_error <= 0.501 * (high - low) / levels + np.spacing(np.float32(high))
        if low == 0:
            assert tuple(restored[0, 0, :2]) == (0, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("precision", LOSSY)
def test_special_values_survive_lossy_precision(dtype, precision):
    array = rng().uniform(-1, 1, 5_000).astype(dtype)
    word = int(dtype[1]) * 8
    inf = int(np.array(np.inf, dtype).view(f"u{dtype[1]}"))
    quiet = 1 << (word - 2 - {"f2": 5, "f4": 8, "f8": 11}[dtype])
    array[[3, 99, 4_998, 4_999]] = floats_of([inf | quiet, inf | 1, inf, inf | 1 << (word - 1)], dtype)
    restored, narrowing = check_lossy(array, precision)
    if narrowing.kind == "affine":
        odd = ~np.isfinite(array)
        assert same_bits(restored[odd], array[odd])


def test_many_nan_payloads_stay_lossless():
    array = rng().random(5_000, "f4")
    array[:100] = floats_of(range(0x7F800001, 0x7F800065), "f4")
    restored, narrowing = round_trip(array, 1e-3)
    assert same_bits(restored, array)
    assert narrowing.kind == "identity"


@pytest.mark.parametrize("precision", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_integer_valued_arrays_are_never_lossy(dtype, precision):
    labels = rng().integers(0, 105, (20, 20, 20)).astype(dtype)
    holes = labels.copy()
    holes[0, 0], holes[1, 1], holes[2, 2] = np.nan, -0.0, np.inf
    for array in (labels, holes, -labels, labels * 0, np.full_like(labels, np.nan)):
        restored, narrowing = round_trip(array, precision)
        assert same_bits(restored, array)
        assert narrowing.max_abs_error == 0
    # Integers too wide for any integer narrower than the float.
    if dtype != "f2":
        wide = rng().integers(-(2**23), 2**23, 300_000).astype(dtype) * (2.0**12 if dtype == "f8" else 1)
        wide = wide.astype(dtype)
        assert same_bits(round_trip(wide, precision)[0], wide)
        wide[7] = np.inf
        assert same_bits(round_trip(wide, precision)[0], wide)


def test_tables_come_before_lossy_codes_of_the_same_width():
    few = np.resize(rng().random(200, "f4"), 50_000)
    some = np.resize(rng().random(3_000, "f4"), 50_000)
    for array, precision, kind in (
        (few, 1e-2, "table"),
        (few, 1e-4, "table"),
        (few, "uint8", "table"),
        (some, 1e-4, "table"),
        (some, "float16", "table"),
        (some, "uint16", "table"),
        (some, 1e-2, "affine"),
        (some, "uint8", "affine"),
    ):
        assert check_lossy(array, precision)[1].kind == kind


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("precision", LOSSY)
def test_ranges_that_no_code_covers(dtype, precision):
    info = np.finfo(dtype)
    ends = np.array([info.min, info.max], dtype)
    tiny = np.array([TINY[dtype], 3 * TINY[dtype], 0, -TINY[dtype]], dtype)
    for extra in (ends, tiny, ends[:1], tiny[:2]):
        array = np.concatenate([rng().random(2_000).astype(dtype), extra])
        check_lossy(array, precision)
        check_lossy(np.resize(extra, 100), precision)
        check_lossy(extra, precision)


def test_float16_falls_back_rather_than_overflow():
    array = rng().random(5_000, "f4")
    _, narrowing = check_lossy(array, "float16")
    assert (narrowing.kind, narrowing.code_dtype) == ("cast", "f2")
    assert 0 < narrowing.max_abs_error <= 2.0**-12
    array[17] = 65_600.5
    restored, narrowing = check_lossy(array, "float16")
    assert same_bits(restored, array)
    assert check_lossy(rng().random(5_000), "float16")[1].code_dtype == "f2"


def test_bounds_that_only_a_narrower_float_meets():
    array = rng().random(200_000) * 1e-3
    array[0] = 0.75
    _, narrowing = check_lossy(array, 1e-6)
    assert (narrowing.kind, narrowing.code_dtype) == ("cast", "f2")
    array[0] = 1.1
    _, narrowing = check_lossy(array, 1e-7)
    assert (narrowing.kind, narrowing.code_dtype) == ("cast", "f4")
    array[1] = floats_of([0x7FF8000000000001], "f8")[0]
    assert check_lossy(array, 1e-7)[1].kind == "identity"
    assert check_lossy(array[2:] + 1, 1e-17)[1].kind == "identity"


# --- restoring --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "precision"),
    [
        (np.resize(rng().random(200, "f4"), (37, 61, 45)), "lossless"),
        (np.resize(rng().random(3_000, "f8"), (37, 61, 45)), "lossless"),
        (rng().integers(0, 9, (37, 61, 45)).astype("f4"), "lossless"),
        (rng().random((37, 61, 45), "f4"), "lossless"),
        (rng().random((37, 61, 45), "f4"), 1e-3),
        (rng().random((37, 61, 45), "f8"), "float16"),
        (rng().random((2, 3, 7 * BLOCK + 5), "f4"), 1e-2),
    ],
)
def test_restoring_parts_into_strided_views(array, precision):
    whole, narrowing = check_lossy(array, precision)
    codes, _ = narrow(array, Precision.parse(precision))
    big = np.full(tuple(n + 4 for n in array.shape), 7, array.dtype)
    inner = big[2:-2, 2:-2, 2:-2]
    assert restore(codes, narrowing, inner) is inner
    assert same_bits(inner.copy(), whole)
    inner[...] = 7
    assert (big == 7).all()
    for part in (np.s_[1:, ::2, 3:30], np.s_[:0], np.s_[..., :1], np.s_[0, 0, 0]):
        out = np.full((*array.shape, 2), 7, array.dtype)[..., 1][part]
        if isinstance(out, np.ndarray):
            restore(codes[part], narrowing, out)
            assert same_bits(out.copy(), whole[part].copy())
        out = np.empty(whole[part].shape, array.dtype, order="F")
        assert same_bits(restore(np.asarray(codes[part]), narrowing, out).copy("C"), whole[part].copy())


def test_restore_refuses_what_does_not_fit():
    codes, narrowing = narrow(np.resize(rng().random(9, "f4"), 100))
    with pytest.raises(ValueError, match="codes are uint16"):
        restore(codes.astype("u2"), narrowing)
    for out in (np.empty(100, "f8"), np.empty(99, "f4"), np.empty((1, 100), "f4")):
        with pytest.raises(ValueError, match="out is"):
            restore(codes, narrowing, out)


@pytest.mark.parametrize(("entries", "code"), [(9, "u1"), (300, "u2")])
def test_codes_beyond_the_table_give_its_last_value(entries, code):
    values = np.unique(rng().random(entries, "f4"))
    _, narrowing = narrow(np.resize(values, 5_000))
    damaged = np.arange(np.iinfo(code).max + 1).astype(code)
    for codes in (damaged, damaged[::2]):
        restored = restore(codes, narrowing)
        assert np.isin(restored, values).all()
        assert (restored[codes >= values.size] == values[-1]).all()


def test_a_narrowing_can_be_pickled_and_its_lut_not_changed():
    array = np.resize(rng().random(9, "f4"), 100)
    codes, narrowing = narrow(array)
    with pytest.raises(ValueError, match="read-only"):
        narrowing.lut()[0] = 1
    assert same_bits(restore(codes, pickle.loads(pickle.dumps(narrowing))), array)


# --- JSON and precision -----------------------------------------------------------------------------------------

AFFINE = {
    "kind": "affine", "dtype": "<f4", "code_dtype": "|u1", "max_abs_error": "0x1p-9",
    "offset": "0x0p+0", "scale": "0x1p-8", "levels": 200, "specials": ["0x7fc00000"],
}  # fmt: skip
TABLE = {"kind": "table", "dtype": "<f4", "code_dtype": "<u2", "max_abs_error": "0x0p+0", "entries": 300}
CAST = {"kind": "cast", "dtype": "<f4", "code_dtype": "|u1", "max_abs_error": "0x0p+0"}


def test_json_has_plain_types_only():
    array = rng().uniform(-1, 1, 3_000).astype("f4")
    array[5] = np.nan
    _, narrowing = narrow(array, Precision.parse(0.01))
    data = to_json(narrowing)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["dtype"] == "<f4"
    assert data["code_dtype"] == "|u1"
    assert data["specials"] == ["0x7fc00000"]
    again = from_json(data)
    assert to_json(again) == data
    assert same_bits(again.lut(), narrowing.lut())


def test_the_examples_of_damage_are_sound_when_not_damaged():
    assert from_json(AFFINE).lut().size == 201
    assert from_json(CAST).kind == "cast"
    assert from_json(TABLE, np.zeros(300, "f4")).table.size == 300


@pytest.mark.parametrize(
    "data",
    [
        None, [], 7, "affine", {}, {"kind": "identity"},
        CAST | {"kind": "pickle"}, CAST | {"kind": ["cast"]}, CAST | {"kind": None},
        CAST | {"dtype": "O"}, CAST | {"dtype": "<U9"}, CAST | {"dtype": "V8"}, CAST | {"dtype": {"a": 1}},
        CAST | {"dtype": "f4"}, CAST | {"dtype": ">f4"}, CAST | {"code_dtype": "<M8[s]"},
        CAST | {"code_dtype": "<f8"}, CAST | {"code_dtype": "<i4"}, CAST | {"code_dtype": "|b1"},
        CAST | {"dtype": "<c16"}, CAST | {"kind": "identity"}, CAST | {"kind": "table"},
        CAST | {"max_abs_error": "nan"}, CAST | {"max_abs_error": "-0x1p+0"}, CAST | {"max_abs_error": 0},
        CAST | {"max_abs_error": "0x1p+99999"},
        AFFINE | {"code_dtype": "|i1"}, AFFINE | {"code_dtype": "<u4"}, AFFINE | {"dtype": "<i4"},
        AFFINE | {"dtype": "<f2", "code_dtype": "<u2"},
        AFFINE | {"levels": 0}, AFFINE | {"levels": -1}, AFFINE | {"levels": 256}, AFFINE | {"levels": 2**70},
        AFFINE | {"levels": True}, AFFINE | {"levels": 1.0}, AFFINE | {"levels": "9"},
        AFFINE | {"offset": "inf"}, AFFINE | {"offset": "x"}, AFFINE | {"scale": None}, AFFINE | {"scale": "0x1p+200"},
        AFFINE | {"specials": ["0x0"]}, AFFINE | {"specials": ["0x7fc000000"]}, AFFINE | {"specials": [1]},
        AFFINE | {"specials": "7fc"}, AFFINE | {"specials": ["-0x1"]}, AFFINE | {"specials": ["0x7fc00000"] * 17},
        {k: v for k, v in AFFINE.items() if k != "scale"},
    ],
)  # fmt: skip
def test_damaged_json_is_refused(data):
    with pytest.raises(EntryDamagedError, match="narrowing is damaged"):
        from_json(data)


@pytest.mark.parametrize(
    ("data", "table"),
    [
        (TABLE, None),
        (TABLE, np.zeros(300, "f8")),
        (TABLE, np.zeros(300, ">f4")),
        (TABLE, np.zeros(299, "f4")),
        (TABLE, np.zeros((300, 1), "f4")),
        (TABLE | {"code_dtype": "|u1"}, np.zeros(300, "f4")),
        (TABLE | {"entries": 0}, np.zeros(0, "f4")),
        (TABLE | {"entries": 65_537}, np.zeros(65_537, "f4")),
        (CAST, np.zeros(300, "f4")),
        (AFFINE, np.zeros(300, "f4")),
    ],
)
def test_damaged_tables_are_refused(data, table):
    with pytest.raises(EntryDamagedError, match="narrowing is damaged"):
        from_json(data, table)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("lossless", "lossless"),
        ("float16", "float16"),
        ("uint8", "uint8"),
        ("uint16", "uint16"),
        (1e-4, "absolute:0.0001"),
        (2, "absolute:2.0"),
        (np.float64(0.5), "absolute:0.5"),
        (np.float32(0.5), "absolute:0.5"),
        ("absolute:0.0001", "absolute:0.0001"),
        (LOSSLESS, "lossless"),
    ],
)
def test_precision(value, text):
    precision = Precision.parse(value)
    assert str(precision) == text
    assert Precision.parse(str(precision)) == precision
    assert hash(Precision.parse(precision)) == hash(precision)


@pytest.mark.parametrize(
    "value",
    [
        0, -1.0, math.nan, math.inf, True, False, np.True_, None, "", "float32", "int8", "absolute", "absolute:",
        "LOSSLESS", "absolute:nan", "absolute:0", "lossless:1", 1j, [], {}, 10**400, np.array([1.0, 2.0]),
    ],
)  # fmt: skip
def test_precision_that_cannot_work(value):
    with pytest.raises(CacheConfigError, match="'uint16', 'uint8', or the largest absolute error"):
        Precision.parse(value)


def test_precision_is_checked_however_it_is_made():
    for kind, bound in (("absolute", 0.0), ("absolute", math.nan), ("lossless", 0.5), ("bits", 0.0)):
        with pytest.raises(CacheConfigError):
            Precision(kind, bound)


# --- real volumes -----------------------------------------------------------------------------------------------


def volume(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: real volumes come with the project's shared data only")
    nibabel = pytest.importorskip("nibabel")
    return np.ascontiguousarray(np.asarray(nibabel.load(path).dataobj, dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "kind", "codes"),
    [
        ("ct_aorta.nii.gz", "cast", "i2"),
        ("ct_aorta_seg.nii.gz", "cast", "u1"),
        ("ct_torso_3mm.nii.gz", "cast", "i2"),
        ("ct_torso_3mm_seg.nii.gz", "cast", "u1"),
        ("mr_t1_head.nii.gz", "cast", "u1"),
        ("mr_t2_head_int16.nii.gz", "cast", "u2"),
        ("mr_pcasl_4d_float32.nii.gz", "cast", "u2"),
        ("ct_angio_scaled_uint8.nii.gz", "table", "u1"),
    ],
)
def test_real_volumes(name, kind, codes):
    array = volume(name)
    _, narrowing = round_trip(array)
    assert (narrowing.kind, narrowing.code_dtype) == (kind, codes)
    if kind == "table":
        assert narrowing.table.size == 256


def windowed(hu):
    return np.clip((hu + np.float32(57)) / np.float32(221), 0, 1)


@pytest.mark.parametrize("name", ["ct_aorta.nii.gz", "ct_torso_3mm.nii.gz"])
def test_real_windowed_ct_has_a_small_table(name):
    array = windowed(volume(name))
    _, narrowing = round_trip(array)
    assert (narrowing.kind, narrowing.code_dtype) == ("table", "u1")
    assert narrowing.table.size == np.unique(array).size <= 222


def test_generated_windowed_ct_has_a_small_table():
    _, narrowing = round_trip(windowed(rng().normal(0, 120, (80, 90, 100)).round().astype("f4")))
    assert (narrowing.kind, narrowing.code_dtype, narrowing.table.size) == ("table", "u1", 222)


def test_real_scaled_mr_has_a_table_of_words():
    array = volume("mr_t2_head_int16.nii.gz")
    _, narrowing = round_trip((array - array.mean()) / array.std())
    assert (narrowing.kind, narrowing.code_dtype, narrowing.table.size) == ("table", "u2", 3_991)


@pytest.mark.parametrize(("precision", "codes"), [("lossless", "f4"), (1e-4, "u2"), ("float16", "f2"), ("uint8", "u1")])
def test_real_interpolated_ct(precision, codes):
    hu = volume("ct_aorta.nii.gz")
    array = windowed((np.float32(0.31) * hu[1:] + np.float32(0.69) * hu[:-1])[:, 1:] * np.float32(0.77)
                     + np.float32(0.23) * hu[1:, :-1])  # fmt: skip
    restored, narrowing = check_lossy(array, precision)
    assert narrowing.code_dtype == codes
    assert (restored[array == 0] == 0).all()
    assert (restored[array == 1] == 1).all()


def test_narrowing_is_comparable_by_identity_only():
    # Tables are arrays: an == that compares them would be ambiguous.
    a, b = (Narrowing("identity", np.dtype("f4"), np.dtype("f4")) for _ in range(2))
    assert a == a  # noqa: PLR0124
    assert a != b


@settings(deadline=None)
@given(st.integers(1, 256), st.integers(1, 999), st.integers(0, 2**32 - 1), st.sampled_from(["f4", "f8", "f2"]))
def test_codes_looked_up_two_at_a_time_give_what_one_at_a_time_gives(entries, size, seed, dtype):
    rng = np.random.default_rng(seed)
    table = np.frombuffer(rng.bytes(entries * np.dtype(dtype).itemsize), dtype)
    codes = rng.integers(0, 256, size, dtype=np.uint8)  # some beyond the table
    narrowing = Narrowing("table", np.dtype(dtype), np.dtype("u1"), table=table)
    expected = table[np.minimum(codes, entries - 1)]
    with pytest.MonkeyPatch.context() as patch:
        for at_least in (1 << 60, 1):
            patch.setattr(restoring, "_MIN_PAIRED", at_least)
            patch.setattr(restoring, "_PAIRED_BLOCK", 64)
            assert restore(codes, narrowing).tobytes() == expected.tobytes()


@given(
    divisor=st.integers(1, 300),
    size=st.integers(2, 301),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    strided=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_dividing_gives_what_looking_up_gives(divisor, size, shape, strided, seed):
    lut = np.arange(size, dtype="f4") / np.float32(divisor)
    code_dtype = np.dtype("u1" if size <= 256 else "u2")
    how = Narrowing("table", lut.dtype, code_dtype, table=lut)
    codes = np.random.default_rng(seed).integers(0, size, shape).astype(code_dtype)
    assert restoring._divisor(lut.tobytes()) == divisor
    out = np.zeros([2 * n for n in shape], "f4")[tuple(slice(0, n) for n in shape)] if strided else None
    assert same_bits(restore(codes, how, out), lut[codes])


@pytest.mark.parametrize(
    "lut",
    [[0.0], [0.0, 0.0], [0.0, np.nan], [0.0, 1e-45], [-0.0, 0.5, 1.0], [0.0, 0.5, 1.1], [0.5, 1.0], [0.0, 2.0, 4.0]],
)
def test_tables_that_are_no_quotients(lut):
    assert restoring._divisor(np.array(lut, "f4").tobytes()) is None


def test_codes_beyond_a_table_of_quotients_give_its_last_value():
    lut = np.arange(5, dtype="f4") / np.float32(4)
    how = Narrowing("table", lut.dtype, np.dtype("u1"), table=lut)
    assert restore(np.array([0, 4, 5, 200], "u1"), how).tolist() == [0.0, 1.0, 1.0, 1.0]
