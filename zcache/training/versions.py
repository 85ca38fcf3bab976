"""Entries that another version of a library made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zcache.cache import Cache

__all__ = ["other_versions"]

_LOOKED_AT = 100  # documents that are read to say how many


def other_versions(
    cache: Cache, key_of: Callable[[Any], str | None], data: Sequence[Any], here: Mapping[str, str]
) -> str:
    """Say which entries of a data set were made with another minor version of a library.

    Parameters
    ----------
    cache : Cache
        Where they are.
    key_of : callable
        ``key_of(item)``: the key of an item.
    data : sequence
        The items, of which a hundred at most are looked at, evenly spread.
    here : mapping of str to str
        The versions of this process, by library.

    Returns
    -------
    str
        A message; empty if there are none.
    """
    number = min(len(data), _LOOKED_AT)
    looked, other, others = 0, 0, Counter[str]()
    for step in range(number):
        key = key_of(data[step * len(data) // number])
        made = cache.about(key).get("versions") if key is not None else None
        if not isinstance(made, Mapping):
            continue
        looked += 1
        differing = {
            f"{name} {made[name]} (here {version})"
            for name, version in here.items()
            if name in made and _minor(str(made[name])) != _minor(version)
        }
        other += bool(differing)
        others.update(differing)
    if not other:
        return ""
    return (
        f"{other} of {looked} entries that were looked at were made with another version: {', '.join(sorted(others))}. "
        "They are used as they are. To have them computed anew, now and after each further change of version, pass "
        "version_in_key=True."
    )


def _minor(version: str) -> list[str]:
    return version.split("+", maxsplit=1)[0].split(".")[:2]
