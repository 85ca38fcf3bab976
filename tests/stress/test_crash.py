"""The short form of what `make stress` does for long: processes killed at random moments lose and spoil nothing."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.stress.board import Board, Crew, fork, run_driver, until, watch


@pytest.mark.timeout(120)
def test_case_05_11_17_35_killed_processes_leave_whole_entries_or_none_and_lose_nothing():
    figures = run_driver("tests.stress.crash", [9, 12, random.randrange(2**32)], 90)
    assert figures["rounds"] >= 3, figures
    assert figures["kills"] == 4 * figures["rounds"]
    for what in ("entries written", "reads", "puts", "flips", "staging left by the killed"):
        assert figures[what] > 0, figures


@pytest.mark.timeout(120)
def test_case_05_21_killed_ranks_and_workers_with_random_crops_leave_whole_entries_or_none_and_lose_nothing():
    figures = run_driver("tests.stress.loaders", [4, 10, random.randrange(2**32)], 100)
    assert figures["kills"] >= 2 * figures["rounds"] > 0, figures
    for what in ("entries written", "reads", "starts"):
        assert figures[what] > 0, figures


def test_a_driver_that_fails_is_heard_of_and_leaves_nothing():
    with pytest.raises(AssertionError, match="ended with status 1"):
        run_driver("tests.stress.crash", ["nonsense"], 60)


def test_what_killed_processes_counted_stays():
    board, crew = Board(2, 3), Crew()

    def work() -> None:
        if fork() == 0:
            watch()
            board.enter(1)
            while True:
                board.add(1, "reads")
        board.known[2] = True
        time.sleep(50)

    crew.start(work)
    while not board.pid(1) or not board.sums()["reads"] or not board.known[2]:
        time.sleep(0.001)
    grandchild = board.pid(1)
    assert crew.is_member(grandchild)
    assert not crew.is_member(os.getpid())
    assert crew.finish() == [-signal.SIGKILL]
    counted = board.sums()["reads"]
    time.sleep(0.02)
    assert board.sums()["reads"] == counted > 0
    until(lambda: not crew.is_member(grandchild), "whoever waits for orphans")
