"""The benchmark of looking into a cache runs, and what it generates is what a cache holds."""

from __future__ import annotations

import pytest

import zcache
from benchmarks import inspect


def test_generated_entries_are_sound_and_differ(tmp_path):
    inspect.generate(tmp_path, 5)
    view = zcache.open_cache(tmp_path)
    assert [info.status for info in view.infos] == ["ok"] * 5
    assert view.infos[3].source[0] == "/data/patient_000003/ct.nii.gz"
    assert view.infos[3].stamps[0].noted == (1 << 20, 1_700_000_000_000_000_003)
    assert {array.name for array in view.infos[4].arrays} == {"image", "label"}
    assert len(view.summary().pipelines) == 1


@pytest.mark.timeout(300)
def test_it_measures_and_reports(tmp_path):
    found = inspect.run(tmp_path, 1, (20, 40))
    assert set(found["ls"]) == {"20", "40"}
    assert all(0 < one["cpu_s"] < 60 for one in found["ls"].values())
    assert list(found["survey"]) == ["1", "2", "4", "8"]
    lines = inspect.report(found, (20, 40))
    assert any(line.startswith("zcache ls,     40 entries") for line in lines)
