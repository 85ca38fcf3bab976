"""Names of arrays: plain, distinct, and never a way out of the entry's folder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcache.encoding.names import NameAllocator, is_array_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("['image']", "image"),
        ('["it\'s"]', "it_s"),
        ("['image'].meta['mask']", "image.meta.mask"),
        ("['deep'][0]['mask']", "deep.0.mask"),
        ("[3]", "3"),
        ("", "array"),
        ("['../../etc/passwd']", "etc_passwd"),
        ("['a/b\\\\c']", "a_b_c"),
        ("['.hidden']", "hidden"),
        ("['a..b']['.c']", "a.b.c"),
        ("['zarr.json']", "zarr.json-array"),
        ("['c']", "c-array"),
        ("['C']", "C-array"),
        ("['labels']", "labels-array"),
        ("['Labels']", "Labels-array"),
        ("['x']['labels']", "x.labels"),
        ("['größe']", "gr_e"),
        ("['日本']", "array"),
    ],
)
def test_names_come_from_the_place_in_the_item(path, name):
    assert NameAllocator().allocate(path) == name
    assert is_array_name(name)


def test_names_stay_distinct_where_case_is_ignored():
    names = NameAllocator()
    paths = ["['image']", "['Image']", "['image']", "['IMAGE-2']", "['image-2']"]
    given_names = [names.allocate(path) for path in paths]
    assert given_names[:3] == ["image", "Image-2", "image-3"]
    assert len({n.lower() for n in given_names}) == 5


ODD_KEYS = ["..", "a..b", "x" * 300, "con", "-", "_x_", "c", "\0"]


@given(st.lists(st.one_of(st.text(), st.sampled_from(ODD_KEYS)), max_size=30))
def test_any_keys_give_distinct_plain_file_names(keys):
    names = NameAllocator()
    given_names = [names.allocate(f"[{key!r}]") for key in keys]
    assert all(is_array_name(n) for n in given_names), given_names
    assert len({n.lower() for n in given_names}) == len(keys)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../image", "a/b", "/etc", "a\\b", "a b", "-a", "_a", ".a", "a..b", "zarr.json", "ZARR.JSON",
        "c", "C", "a\0", "a\n", "ä", "x" * 121,
    ],
)  # fmt: skip
def test_what_is_no_plain_name_is_refused(name):
    assert not is_array_name(name)


def test_every_allowed_length_fits_a_file_system():
    assert is_array_name("x" * 120)
    assert len(NameAllocator().allocate(f"['{'x' * 500}']")) == 80
