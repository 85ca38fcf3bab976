"""The short form of what `make stress` does for long: shared memory under processes that come, go and are killed."""

from __future__ import annotations

import random

import pytest

from tests.stress.board import run_driver


@pytest.mark.timeout(120)
def test_case_21_memory_that_is_given_up_and_refilled_is_never_read_wrong_and_the_ledger_is_right():
    figures = run_driver("tests.stress.memory", [3, 30, random.randrange(2**32)], 100)
    assert figures["rounds"] > 0, figures
    for what in ("reads", "misses", "files written", "files given up"):
        assert figures[what] > 0, figures
