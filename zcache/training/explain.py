"""Why an item is computed although the cache holds entries of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zcache.cache import Cache
from zcache.keys import Difference, Json, nearest, source_paths

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an item is found, or not.

    Attributes
    ----------
    key : str or None
        The key that the item has now.
    is_cached : bool
        Whether there is an entry of that key.
    nearest : str or None
        The key of the entry of the same source whose ingredients differ least; the newest of those.
    created : str
        When that one was made.
    differences : tuple of Difference
        In what the two keys differ.
    note : str
        What else there is to say.
    """

    key: str | None
    is_cached: bool = False
    nearest: str | None = None
    created: str = ""
    differences: tuple[Difference, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if self.key is None:
            return self.note
        lines = [f"{self.key}: {'in the cache' if self.is_cached else 'not in the cache'}"]
        if self.nearest is not None:
            lines.append(f"nearest entry of the same source: {self.nearest}, made {self.created}; since then")
            lines += [f"  {difference}" for difference in self.differences]
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def explain(cache: Cache, key: str, parts: Mapping[str, Json], item: Any) -> Explanation:
    """Find the entry that an item's key is nearest to.

    Parameters
    ----------
    cache : Cache
        All of whose documents are read.
    key : str
        The key of the item.
    parts : mapping of str to Json
        What it is made of, the whole pipeline among it.
    item : object
        The item.

    Returns
    -------
    Explanation
        What was found.
    """
    if key in cache:
        return Explanation(key, is_cached=True)
    entries = ((other, cache.about(other)) for other in cache.keys())  # noqa: SIM118 - not a mapping
    found = nearest(parts, source_paths(item), entries)
    if found is None:
        return Explanation(key, note="no entry of the same source says what its key was made of")
    return Explanation(key, False, found.key, found.created, found.differences)
