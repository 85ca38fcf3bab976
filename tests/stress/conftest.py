"""Faults are counted, and the sums printed at the end: figures for docs/reliability.md."""

from __future__ import annotations

from collections import Counter

import pytest

_PREFIX = "stress: "


@pytest.fixture
def tally(record_property):
    """Count outcomes by name; they travel with the test's report, from worker processes too."""
    counts: Counter[str] = Counter()
    yield counts
    for what, n in counts.items():
        record_property(_PREFIX + what, n)


def pytest_terminal_summary(terminalreporter):
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith(_PREFIX) and getattr(report, "when", "") == "teardown":
                    totals[name.removeprefix(_PREFIX)] += value
    if sum(totals.values()):
        figures = ", ".join(f"{n} {what}" for what, n in sorted(totals.items()) if n)
        terminalreporter.write_line(f"stress: {figures}")
