"""What is noted of source files, so that it can be told later whether they were changed."""

from __future__ import annotations

import os
from pathlib import Path

from zcache.keys import item_fingerprint, source_stamps, stamp


def test_files_folders_and_text(tmp_path, monkeypatch):
    data = tmp_path / "data"
    (data / "series").mkdir(parents=True)
    (data / "series" / "1.dcm").write_bytes(b"12345")
    (data / "a.nii.gz").write_bytes(b"123")
    outside = tmp_path / "b.nii.gz"
    outside.write_bytes(b"")
    monkeypatch.chdir(data)
    item = {"image": "a.nii.gz", "same": data / "a.nii.gz", "dicom": str(data / "series"), "text": "series", "n": 3}
    found = source_stamps([item, str(outside), "missing.nii.gz"], root=data)
    assert [one["path"] for one in found] == ["a.nii.gz", "series", outside.as_posix()]
    assert found[0] == {"path": "a.nii.gz", "size": 3, "mtime_ns": (data / "a.nii.gz").stat().st_mtime_ns}
    assert (found[1]["entries"], len(found[1]["digest"])) == (1, 32)
    assert [one["path"] for one in source_stamps(["a.nii.gz"])] == [(data / "a.nii.gz").as_posix()]


def test_it_changes_when_the_key_does(tmp_path):
    folder = tmp_path / "series"
    folder.mkdir()
    path = folder / "a.nii.gz"
    path.write_bytes(b"1")

    def now():
        noted = [stamp(str(path)), stamp(str(folder))]
        return noted, item_fingerprint([str(path)]), item_fingerprint([Path(folder)])

    before = now()
    assert now() == before
    os.utime(path, ns=(1, 1))
    touched = now()
    assert all(a != b for a, b in zip(before, touched, strict=True))
    assert touched[0][0] == {"size": 1, "mtime_ns": 1}
    path.write_bytes(b"22")
    assert stamp(str(path))["size"] == 2


def test_what_is_neither_a_file_nor_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "missing", tmp_path / ("x" * 300), "a\0b"):
        assert stamp(str(path)) is None
    assert stamp(str(tmp_path), 0) is None
    assert stamp(str(tmp_path), 1) == stamp(str(tmp_path))
