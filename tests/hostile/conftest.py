"""Mutations are counted, and the sums printed at the end: figures for docs/reliability.md."""

from __future__ import annotations

from collections import Counter

import pytest

_PREFIX = "hostile: "


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
                if getattr(report, "when", "") == "call" or name.startswith(_PREFIX):
                    totals[name.removeprefix(_PREFIX)] += value if name.startswith(_PREFIX) else 0
    if sum(totals.values()):
        figures = ", ".join(f"{n} {what}" for what, n in sorted(totals.items()) if n)
        terminalreporter.write_line(f"hostile mutations: {figures}")
