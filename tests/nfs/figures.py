"""What the processes on all hosts counted, summed per test and kind of mount, as a table for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Figures"]

_COLUMNS = ("written", "raced", "read", "misses", "removed", "damaged", "healed", "read errors", "wrong", "torn")


@dataclass
class Figures:
    """Counts by (test, mount)."""

    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def add(self, test: str, mount: str, counts: dict[str, int]) -> None:
        self.rows.setdefault((test, mount), Counter()).update(counts)

    def table(self) -> list[str]:
        """Return the lines of a Markdown table, a sum at the end."""
        total: Counter[str] = Counter()
        for counts in self.rows.values():
            total.update(counts)
        head = ["test", "mount", *_COLUMNS]
        cells = [head, ["---", "---", *["---:"] * len(_COLUMNS)]]
        for (test, mount), counts in [*self.rows.items(), (("all", ""), total)]:
            cells.append([test, mount, *(f"{counts[name]:,}" for name in _COLUMNS)])
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        align = [str.ljust, str.ljust, *[str.rjust] * len(_COLUMNS)]
        return ["| " + " | ".join(a(c, w) for a, c, w in zip(align, row, widths, strict=True)) + " |" for row in cells]
