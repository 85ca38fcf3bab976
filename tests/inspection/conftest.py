"""A cache to look into."""

from __future__ import annotations

from pathlib import Path

import pytest

import zcache
from tests.inspection.caches import three_entries


@pytest.fixture
def cache_dir(tmp_path) -> Path:
    return three_entries(tmp_path / "cache")


@pytest.fixture
def view(cache_dir) -> zcache.CacheView:
    return zcache.open_cache(cache_dir)
