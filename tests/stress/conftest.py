"""What tests of faults share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path):
    """Where a thousand small caches cost little: in memory, if there is such a place."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="zcache-faults-", dir=memory if memory.is_dir() else tmp_path))
    yield made
    shutil.rmtree(made)
