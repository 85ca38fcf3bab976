"""Files that items and transforms name: versions, links, samples of the content."""

import os
import shutil
from pathlib import Path

import pytest

from zcache.keys import files
from zcache.keys.files import content_sample, source_form

TIME_NS = 10**18


@pytest.fixture
def sets(tmp_path):
    """Two folders whose files share sizes and times, and differ in their content."""
    for version in ("v1", "v2"):
        (tmp_path / version / "series").mkdir(parents=True)
        for name in ("a.npy", "series/1.dcm"):
            path = tmp_path / version / name
            path.write_bytes(version.encode() * 50_000)
            os.utime(path, ns=(TIME_NS, TIME_NS))
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "far").symlink_to(tmp_path / "v1")
    return tmp_path


def relink(sets, name, to):
    (sets / name).unlink()
    (sets / name).symlink_to(to)


def test_an_absolute_path_without_links_is_not_opened(sets):
    path = str(sets / "v1" / "a.npy")
    assert source_form(path, None) == ["file", path, 100_000, TIME_NS]
    assert source_form(path, str(sets)) == ["file", ["rooted", "str", "v1/a.npy"], 100_000, TIME_NS]


@pytest.mark.parametrize("base", [None, "here"])
@pytest.mark.parametrize("link", ["current", "far"])
@pytest.mark.parametrize("name", ["a.npy", "series"])
def test_a_link_that_leads_elsewhere(sets, base, link, name):
    path, root = str(sets / link / name), base and str(sets)
    first = source_form(path, root)
    relink(sets, link, "v2" if link == "current" else sets / "v2")
    second = source_form(path, root)
    assert first != second
    assert first[-1][-1] == "v1"
    assert second[-1][-1] == "v2", "the last name of a link to an absolute path: hosts mount it elsewhere"
    assert str(sets) not in str(source_form(path, str(sets)))


def test_a_relative_path_counts_with_a_sample_unless_it_lies_below_the_root(sets, monkeypatch):
    forms, rooted = [], []
    for version in ("v1", "v2"):
        monkeypatch.chdir(sets / version)
        forms.append(source_form("a.npy", None))
        rooted.append(source_form("a.npy", str(sets)))
    assert forms[0] != forms[1]
    assert [form[:4] for form in forms] == [["file", "a.npy", 100_000, TIME_NS]] * 2
    assert rooted == [["file", ["rooted", "str", f"{version}/a.npy"], 100_000, TIME_NS] for version in ("v1", "v2")]


def test_a_chain_of_links_and_one_that_goes_in_a_circle(sets):
    (sets / "chain").symlink_to("current")
    assert source_form(str(sets / "chain" / "a.npy"), str(sets))[-1] == ["current", "v1"]
    (sets / "up").symlink_to("v2/../current")
    assert source_form(str(sets / "up" / "a.npy"), str(sets))[-1] == ["v2/../current", "v1"]
    (sets / "round").symlink_to("round")
    assert source_form(str(sets / "round"), None) is None


def test_links_above_the_root_do_not_count_but_those_on_the_way_to_it_ask_for_a_sample(sets):
    through, straight = (source_form(str(sets / top / "a.npy"), str(sets / top)) for top in ("current", "v1"))
    assert through[:4] == straight
    assert len(through) == 5


def test_a_moved_copy_has_the_same_form_below_its_root(sets, tmp_path):
    shutil.copytree(sets, tmp_path / "copy", symlinks=True)
    for name in ("v1/a.npy", "current/a.npy", "current/series"):
        places = (sets, tmp_path / "copy")
        assert source_form(str(places[0] / name), str(places[0])) == source_form(str(places[1] / name), str(places[1]))


def test_a_link_to_a_folder_inside_a_folder_counts_by_its_text(sets):
    (sets / "v1" / "series" / "more").symlink_to("../../v1")
    first = source_form(str(sets / "v1" / "series"), None)
    relink(sets / "v1" / "series", "more", "../../v2")
    assert source_form(str(sets / "v1" / "series"), None) != first


@pytest.mark.parametrize(("size", "ending"), [(10, ".npy"), (32_768, ".npy"), (200_000, ".npy"), (200_000, ".nii.gz")])
def test_a_sample_of_the_content(size, ending, tmp_path):
    path = tmp_path / f"x{ending}"
    path.write_bytes(bytes(size))
    samples = {content_sample(str(path), path.stat())}
    places = [0, size - 1, size // 2] if size < 40_000 else [0, size - 1]
    for place in places:
        data = bytearray(size)
        data[place] = 1
        path.write_bytes(data)
        samples.add(content_sample(str(path), path.stat()))
    assert len(samples) == 1 + len(places)


def test_a_file_is_read_once_for_each_of_its_versions(sets, monkeypatch):
    opened = []
    path = str(sets / "current" / "a.npy")

    def noted(name, *args, **options):
        opened.append(name)
        return open(name, *args, **options)  # noqa: PTH123 - as called

    monkeypatch.setattr(files, "open", noted, raising=False)
    assert source_form(path, None) == source_form(path, None)
    assert opened == [path]
    Path(path).write_bytes(b"other")
    source_form(path, None)
    assert opened == [path, path]


def test_a_file_that_cannot_be_read_is_told_by_what_is_known(sets, monkeypatch):
    monkeypatch.setattr(files, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError), raising=False)
    assert source_form(str(sets / "current" / "a.npy"), None)[4] is None


def test_what_is_neither_file_nor_folder(sets, monkeypatch):
    os.mkfifo(sets / "pipe")
    assert source_form(str(sets / "pipe"), None) is None
    assert source_form(str(sets / "missing"), None) is None
    assert source_form(str(sets / "v1"), None, folders=False) is None
    monkeypatch.chdir(sets)
    assert source_form("v1", None) is None, "a word"
    assert source_form(Path("v1"), None)[0] == "folder"
