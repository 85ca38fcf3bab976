"""A cache opened to be looked at: found, filtered, shown, never written to, whoever writes meanwhile."""

from __future__ import annotations

import datetime as dt
import io
import os
import re
import shutil
import threading

import numpy as np
import pandas as pd
import pytest
import zarr
from rich.console import Console

import zcache
from tests.inspection.caches import about, fill, item
from tests.support import files_under, in_fork, key, run_script, same_bits
from zcache.inspection import rich_tables
from zcache.inspection.display import letters
from zcache.inspection.moments import parse_moment
from zcache.inspection.verify import verify
from zcache.storage.store import Store

KEYS = [key(1), key(2), "f" * 32]


def test_it_is_a_mapping(view):
    assert list(view) == KEYS
    assert len(view) == 3
    assert key(1) in view
    assert key(9) not in view
    assert [entry.key for entry in view.values()] == KEYS
    with pytest.raises(KeyError, match=r"no entry of .* is called 'x'"):
        view["x"]


def test_arrays_have_their_bits(view):
    expected = item(2)
    entry = view[key(2)]
    for name in ("image", "label"):
        assert same_bits(entry.read(name), expected[name])
        assert same_bits(entry.load()[name], expected[name])
    assert entry.load()["age"] == np.int64(42)
    assert entry.scalars == {"id": "P002", "age": "42"}
    stored = entry.arrays["image"]
    assert isinstance(stored, zarr.Array)
    assert np.array_equal(stored[:], expected["image"].astype(np.int16))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("patient_002", [key(2)]),
        ("PATIENT_00", KEYS),
        ("seg.nii", KEYS),
        ("p003", ["f" * 32]),
        ("41", [key(1)]),
        ("ffff", ["f" * 32]),
        ("nothing", []),
        ("Spacingd", []),
    ],
)
def test_find(view, text, found):
    assert list(view.find(text)) == found


def test_filter(view):
    assert list(view.filter(transform="spacing")) == KEYS
    assert list(view.filter(transform="pixdim=[3.0")) == ["f" * 32]
    assert list(view.filter(transform="Flip")) == []
    assert list(view.filter(since="1d")) == KEYS
    assert list(view.filter(before=dt.timedelta(days=1))) == []
    assert list(view.filter(before=dt.date(2100, 1, 1), status="ok")) == KEYS
    sizes = sorted(info.stored_bytes for info in view.infos)
    assert [i.stored_bytes for i in view.filter(max_bytes=sizes[0]).infos] == [sizes[0]]
    assert len(view.filter(min_bytes=sizes[1])) == 2
    assert list(view.find("patient_001").filter(transform="Load")) == [key(1)]
    with pytest.raises(zcache.CacheConfigError, match="since='soon' is neither an age"):
        view.filter(since="soon")


def test_resolve(view):
    assert view.resolve("f").key == "f" * 32
    assert view.resolve(key(1)).key == key(1)
    assert view.resolve("patient_002").key == key(2)
    with pytest.raises(
        zcache.EntryNotFoundError, match=r"'0' means 2 entries: 000000000000 \(patient_001/ct.nii.gz, seg.nii.gz\)"
    ):
        view.resolve("0")
    with pytest.raises(zcache.EntryNotFoundError, match=r"mentions it; did you mean ffffffffffff \(patient_003/ct.nii"):
        view.resolve("fffe")
    with pytest.raises(zcache.EntryNotFoundError, match=r"did you mean ffff"):
        view.resolve("ct.nii.tz")
    with pytest.raises(zcache.EntryNotFoundError, match=r"mentions it$"):
        view.resolve("zzz")


def test_summary(view):
    summary = view.summary()
    assert (summary.n_entries, summary.counts) == (3, {"ok": 3})
    assert summary.raw_bytes == sum(info.raw_bytes for info in view.infos)
    assert [n for _, n in summary.pipelines] == [2, 1]
    assert summary.differences() == {"B": ["~ Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]"]}
    assert {(g.name, g.count, g.dtype, g.stored_dtype) for g in summary.arrays} == {
        ("image", 3, "float32", "int16"),
        ("label", 3, "uint8", "uint8"),
    }
    text = str(summary)
    assert "pipeline A, 2 entries\n  1. LoadImaged(keys=['image', 'label'])" in text
    assert "pipeline B, 1 entry\n  ~ Spacingd: pixdim=" in text
    assert "float32→int16" in summary._repr_html_()


def test_dataframe(view):
    frame = view.to_dataframe()
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == 6
    assert frame["stored_bytes"].sum() < frame["raw_bytes"].sum()
    assert set(frame["pipeline"]) == {"A", "B"}
    assert frame.loc[0, "shape"] == (1, 40, 44, 48)


def test_text_and_html(view, tmp_path):
    text = repr(view)
    assert "3 entries" in text
    assert "image 1×40×44×48 float32→int16, label 1×40×44×48 uint8" in text
    assert "  patient_001/ct.nii.gz, seg.nii.gz" in text  # names of files and their folder, not whole paths
    html = view._repr_html_()
    assert html.count("data:image/png;base64,") == 3
    assert "pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]" in html
    entry = view[key(1)]
    assert "/data/patient_001/ct.nii.gz" in repr(entry)
    assert "Spacingd(keys=['image', 'label'], pixdim=[1.0, 1.0, 2.0])" in repr(entry)
    assert entry._repr_html_().count("<img") == 3
    empty = zcache.open_cache(fill(tmp_path / "empty", {key(1): {"n": 1}})).find("nothing")
    assert "0 entries" in repr(empty)
    assert "0 entries" in empty._repr_html_()


def test_what_a_cache_says_reaches_neither_terminal_nor_page(tmp_path):
    nasty = {
        "source": ["/a/<script>alert(1)</script>\x1b[2J.nii"],
        "pipeline": [{"transform": "<b>\x07", "parameters": {}}],
    }
    view = zcache.open_cache(fill(tmp_path / "cache", {key(1): {"<i>\x1b": np.zeros(5000)}}, lambda _: nasty))
    entry = view[key(1)]
    for text in (repr(view), repr(entry), str(view.summary())):
        assert "\x1b" not in text
        assert "\x07" not in text
    for html in (view._repr_html_(), entry._repr_html_(), view.summary()._repr_html_()):
        assert "<script>" not in html
        assert "<b>\\x07" not in html
        assert "\x1b" not in html


def drawn(thing, width=200, *, styles=True) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(thing)
    return console.export_text(styles=styles)


def test_rich(view, tmp_path):
    assert "3 entries" in drawn(view)
    assert "Spacingd: pixdim=[1.0, 1.0, 2.0] → [3.0, 3.0, 3.0]" in drawn(view.summary())
    assert "/data/patient_001/ct.nii.gz" in drawn(view[key(1)])
    nasty = {"source": ["/a/[red]b[bold]\x1b]0;title\x07.nii"]}
    view = zcache.open_cache(fill(tmp_path / "nasty", {key(i): {"a": i} for i in range(60)}, lambda _: nasty))
    text = drawn(view)
    assert "[red]b[bold]\\x1b]0;title\\x07.nii" in text.replace("\n", "")
    assert "\x1b]0" not in text
    assert "and 10 more" in text


def test_a_narrow_terminal_gets_an_array_and_a_file_to_a_line(view):
    listed = rich_tables.entries(view.infos, letters(view.infos), dt.datetime.now(dt.UTC))
    lines = [line.rstrip() for line in drawn(listed, 100, styles=False).splitlines()]
    assert lines[0].split() == ["key", "age", "stored", "ratio", "by", "arrays", "source"]
    assert lines[1].endswith("A   image 1×40×44×48 float32→int16  patient_001/ct.nii.gz")
    assert lines[2].split() == ["label", "1×40×44×48", "uint8", "seg.nii.gz"]
    assert len(lines) == 7
    assert "raw" in drawn(listed, 120, styles=False).splitlines()[0]
    text = drawn(view[key(1)], 60, styles=False)
    assert "step 2    Spacingd(keys=['image', 'label'], pixdim=[1.0,\n          1.0, 2.0])" in re.sub(
        " +\n", "\n", text
    )


def test_sources_of_one_name_are_told_apart(view):
    with pytest.raises(
        zcache.EntryNotFoundError, match=r"\(patient_001/ct.nii.gz, seg.nii.gz, by pipeline A\), .*by pipeline B"
    ):
        view.resolve("ct.nii")


def test_many_entries_are_looked_up_at_a_time_and_share_their_pipelines(tmp_path):
    folder = fill(tmp_path / "cache", {key(i): {"n": i} for i in range(100)})
    view = zcache.open_cache(folder)
    assert [info.key for info in view.infos] == [key(i) for i in range(100)]
    assert len({id(info.pipeline) for info in view.infos}) == 1
    assert [info.source for info in view.infos] == [tuple(about(i)["source"]) for i in range(100)]
    shutil.rmtree(view[key(50)].path)
    assert len(zcache.open_cache(folder).infos) == 99


def test_nothing_is_written(cache_dir):
    before = files_under(cache_dir)
    view = zcache.open_cache(cache_dir)
    for entry in view.values():
        entry.load(), entry.meta, repr(entry), entry.plot(), entry.arrays, entry._repr_html_()
    view.find("x"), view.summary(), view.to_dataframe(), repr(view)
    assert files_under(cache_dir) == before


def test_where_there_is_no_cache(tmp_path, cache_dir):
    for path, message in [
        (tmp_path / "cahce", "did you mean .*cache"),
        (tmp_path, "has no cache.zarr; did you mean .*cache"),
        (cache_dir / "cache.zarr" / key(1), "did you mean .*cache"),
        (cache_dir / "cache.zarr" / "zarr.json", "is a file"),
        (tmp_path / "a" / "b", "there is no directory"),
    ]:
        with pytest.raises(zcache.CacheConfigError, match=message):
            zcache.open_cache(path)
    assert len(zcache.open_cache(cache_dir / "cache.zarr")) == 3


def test_an_entry_that_goes_after_it_was_listed(view):
    shutil.rmtree(view[key(1)].path)
    assert [info.key for info in view.infos] == KEYS[1:]
    assert [entry.info.status for entry in view.values()] == ["gone", "ok", "ok"]
    assert view.summary().n_entries == 2
    with pytest.raises(zcache.EntryNotFoundError, match="was removed"):
        view[key(1)].load()


def test_an_entry_that_is_replaced_while_it_is_open(cache_dir, view):
    entry = view[key(1)]
    assert same_bits(entry.read("image"), item(1)["image"])
    shutil.rmtree(entry.path)
    fill(cache_dir, {key(1): item(7)})
    assert same_bits(entry.load()["image"], item(7)["image"]) or same_bits(entry.load()["image"], item(1)["image"])
    assert same_bits(zcache.open_cache(cache_dir)[key(1)].load()["image"], item(7)["image"])


def test_case_35_listing_while_others_write_and_remove(cache_dir):
    stop = threading.Event()
    store = Store(cache_dir)
    rounds = 0

    def churn():
        nonlocal rounds
        while not stop.is_set():
            i = 16 + rounds
            fill(cache_dir, {key(i): {"x": np.arange(3000) + i}})
            if rounds > 4:
                store.remove(key(i - 4))
            rounds += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = set()
        while rounds < 40:
            view = zcache.open_cache(cache_dir)
            infos = view.infos
            assert set(KEYS) <= {info.key for info in infos}
            assert {info.status for info in infos} == {"ok"}  # whole or absent, never half of one
            assert all(info.arrays[0].shape == (3000,) for info in infos if info.key not in KEYS)
            assert [verdict.status for verdict in verify(view.find("P00"))] == ["ok"] * 3
            repr(view), view.summary()
            seen |= set(view)
    finally:
        stop.set()
        thread.join()
        store.close()
    assert len(seen) > len(KEYS)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_case_37_a_group_that_does_not_own_the_cache_reads_it(cache_dir):
    for path in [cache_dir, *cache_dir.rglob("*")]:
        os.chown(path, 0, 4242)
        path.chmod(0o2750 if path.is_dir() else 0o640)

    def look():
        os.chdir(cache_dir)  # the folders above are the tests' own
        os.setgroups([4242])
        os.setgid(4243)
        os.setuid(4243)
        view = zcache.open_cache(".")
        assert [info.status for info in view.infos] == ["ok"] * 3
        assert same_bits(view[key(1)].read("image"), item(1)["image"])

    in_fork(look)


def test_case_36_a_store_of_another_format(cache_dir):
    assert zcache.open_cache(cache_dir).problem == ""
    document = cache_dir / "cache.zarr" / "zarr.json"
    document.write_text(document.read_text().replace('"format":1', '"format":2'))
    assert zcache.open_cache(cache_dir).problem == "it has format 2; this zcache reads format 1"
    document.unlink()
    assert "no zarr.json" in zcache.open_cache(cache_dir).problem


def test_it_opens_without_loading_anything_large(tmp_path):
    script = """
        import sys
        import zcache
        zcache.open_cache
        print(sorted({"torch", "monai", "zarr", "rich", "matplotlib"} & set(sys.modules)))
    """
    assert run_script(script, folder=tmp_path) == "[]"


def test_moments():
    now = dt.datetime(2026, 3, 31, 12, tzinfo=dt.UTC)
    assert parse_moment("2026-01-31T00:00+02:00", now) == dt.datetime(2026, 1, 30, 22, tzinfo=dt.UTC)
    assert parse_moment("99999y", now).year == 1
    assert parse_moment(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), now).day == 1
    for text in ("", "30", "d", "-3d", "nan d", "2026-13-01", "1e9999d"):
        with pytest.raises(zcache.CacheConfigError):
            parse_moment(text, now)


def test_about_of_the_test_is_what_a_dataset_writes(tmp_path):
    from zcache.keys import describe  # noqa: PLC0415

    assert describe([abs])[0].keys() == about(1)["pipeline"][0].keys()
