"""What goes is decided from ages and sizes alone."""

from __future__ import annotations

import datetime as dt
import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zcache
from tests.inspection.caches import fill
from tests.support import key
from zcache.inspection import prune
from zcache.inspection.prune import Candidate, candidates, plan

NOW = dt.datetime(2026, 6, 1, tzinfo=dt.UTC)


def entry(name, created_days, used_days, nbytes=100):
    return Candidate(name, NOW - dt.timedelta(created_days), NOW - dt.timedelta(used_days), nbytes)


ENTRIES = [entry("a", 90, 1), entry("b", 60, 50), entry("c", 10, 9), entry("d", 5, 5, 1000)]


def planned(**kwargs):
    return [removal.entry.key for removal in plan(ENTRIES, **kwargs)]


def test_by_age():
    assert planned() == []
    assert planned(older_than=NOW - dt.timedelta(30)) == ["a", "b"]
    assert planned(unused_since=NOW - dt.timedelta(30)) == ["b"]
    assert planned(older_than=NOW - dt.timedelta(80), unused_since=NOW - dt.timedelta(7)) == ["a", "b", "c"]


def test_by_size():
    assert planned(max_size=10_000) == []
    assert planned(max_size=1200) == ["b"]
    assert planned(max_size=1100) == ["b", "c"]
    assert planned(max_size=99) == ["b", "c", "d", "a"]
    assert planned(older_than=NOW - dt.timedelta(80), max_size=1100) == ["a", "b"]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 500)), max_size=20), st.integers(1, 3000)
)
def test_what_stays_fits_and_was_used_later(rows, max_size):
    entries = [entry(f"{i:02}", max(c, u), u, n) for i, (c, u, n) in enumerate(rows)]
    gone = [removal.entry for removal in plan(entries, max_size=max_size)]
    kept = [e for e in entries if e not in gone]
    assert sum(e.stored_bytes for e in kept) <= max_size
    assert all(a.used <= b.used for a, b in pairwise(gone))
    if gone:
        assert max(e.used for e in gone) <= min((e.used for e in kept), default=NOW)
        assert sum(e.stored_bytes for e in kept) + gone[-1].stored_bytes > max_size


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 500), st.booleans()), max_size=20), st.integers(1, 3000))
def test_what_is_stale_goes_first_whatever_its_age(rows, max_size):
    entries = [
        Candidate(
            f"{i:02}", NOW - dt.timedelta(used), NOW - dt.timedelta(used), n, stale="x.nii is gone" if stale else ""
        )
        for i, (used, n, stale) in enumerate(rows)
    ]
    stale = {e.key for e in entries if e.stale}
    assert {r.entry.key for r in plan(entries, stale=True)} == stale
    assert {r.reason for r in plan(entries, stale=True)} <= {"x.nii is gone"}
    assert plan(entries) == []
    both = plan(entries, stale=True, max_size=max_size)
    fresh = [e for e in entries if not e.stale]
    assert [r.entry.key for r in both[len(stale) :]] == [r.entry.key for r in plan(fresh, max_size=max_size)]


def test_use_is_when_the_arrays_were_read(cache_dir):
    shard = cache_dir / "cache.zarr" / key(1) / "image/c/0/0/0/0"
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=3)
    os.utime(shard, (later.timestamp(), shard.stat().st_mtime))
    found = {c.key: c for c in candidates(zcache.open_cache(cache_dir))}
    assert abs(found[key(1)].used - later) < dt.timedelta(seconds=1)
    assert found[key(2)].used < later - dt.timedelta(days=2)
    assert found[key(2)].used >= found[key(2)].created
    assert found[key(1)].stored_bytes == zcache.open_cache(cache_dir)[key(1)].info.stored_bytes


def test_entries_without_arrays_and_damaged_ones(tmp_path):
    folder = fill(tmp_path / "cache", {key(1): {"n": 1}, key(2): {"n": 2}})
    (folder / "cache.zarr" / key(2) / "zarr.json").write_bytes(b"{}")
    assert [c.key for c in candidates(zcache.open_cache(folder))] == [key(1)]


def test_a_file_system_that_does_not_note_reads(cache_dir, monkeypatch):
    view = zcache.open_cache(cache_dir)
    monkeypatch.setattr(prune, "keeps_no_access_times", lambda _: True)
    assert len(candidates(view)) == 3
    with pytest.raises(zcache.CacheConfigError, match="mounted with noatime"):
        candidates(view, need_use=True)
