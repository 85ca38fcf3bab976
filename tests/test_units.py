"""Numbers of bytes as people write them."""

from __future__ import annotations

import pytest

from zcache.errors import CacheConfigError
from zcache.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "n"),
    [
        (1, 1), (2_000_000, 2_000_000), ("1", 1), ("17B", 17), ("1KiB", 1024), ("1 kb", 1000), ("512MiB", 2**29),
        ("1.5 GB", 1_500_000_000), ("2M", 2**21), ("2T", 2**41), (" 3 g ", 3 * 2**30),
    ],
)  # fmt: skip
def test_numbers_of_bytes(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", [0, -1, True, 1.5, None, "", "GiB", "-1", "0.2", "1 XB", "1e9", "1,5 GB", "nan", b"1"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(CacheConfigError, match="is not a number of bytes"):
        parse_bytes(text)
