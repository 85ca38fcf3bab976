"""The short form of what `make stress` does for long: DataLoader workers start in a process that is writing."""

from __future__ import annotations

import pytest

from tests.stress.board import run_driver


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("method", "kind", "starts"),
    [("fork", "torch", 4), ("fork", "monai", 4), ("forkserver", "torch", 4), ("spawn", "torch", 2)],
)
def test_case_14_workers_start_while_their_parent_writes(method, kind, starts):
    figures = run_driver("tests.stress.starts", [method, kind, starts, 100], 120)
    assert figures["starts"] == starts
    assert figures["workers"] == 2 * starts
