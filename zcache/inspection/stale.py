"""Which entries are stale: a source file is another than the one that the key was made from, so nobody asks for them.

Only what can be known counts. A file that is gone makes an entry stale if its folder is there and holds something: a
disk that is not mounted, or mounted elsewhere, must never make a whole cache stale. Paths come from the cache, which
may be anybody's: they are asked for size and time, never opened, one relative to a root never leaves it, and of a
folder no more is listed than the entry says it held.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from zcache.encoding.payload import Json
from zcache.errors import CacheConfigError
from zcache.keys import stamp

__all__ = ["Found", "Freshness", "Sources", "Stamp", "judge", "read_stamps"]

Noted: TypeAlias = tuple[int, int] | tuple[int, str]
"""Size and modification time (ns) of a file; number of entries and digest of a folder."""

_LARGEST = 100_000  # entries of a folder that are compared: each is asked for its size

Found: TypeAlias = Noted | Literal["gone", "out of reach"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """A source file or folder as it was when the entry was written.

    Attributes
    ----------
    path : str
        Absolute, or relative to the root of the data.
    noted : tuple
        What tells it from later versions.
    """

    path: str
    noted: Noted


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether an entry is that of its source files.

    Attributes
    ----------
    status : str
        ``"fresh"``; ``"stale"``; ``"unknown"`` if the entry does not say what it was made from, or that is out of reach
        and nothing else is known to have changed.
    reasons : tuple of str
        What was changed or is gone; or what is out of reach.
    """

    status: Literal["fresh", "stale", "unknown"]
    reasons: tuple[str, ...] = ()


def read_stamps(recorded: Json) -> tuple[Stamp, ...]:
    """Read what an entry says of its sources; nothing, if that is malformed or missing.

    Examples
    --------
    >>> read_stamps([{"path": "a.nii.gz", "size": 7, "mtime_ns": 3}])
    (Stamp(path='a.nii.gz', noted=(7, 3)),)
    """
    try:
        return tuple(_read_stamp(one) for one in recorded or ())
    except (KeyError, TypeError, ValueError):
        return ()


def _read_stamp(one: Json) -> Stamp:
    if not isinstance(one["path"], str):
        raise TypeError
    return Stamp(one["path"], _noted(one))


def _noted(one: Mapping[str, Json]) -> Noted:
    if "size" in one:
        return int(one["size"]), int(one["mtime_ns"])
    return int(one["entries"]), str(one["digest"])


def judge(stamps: Sequence[Stamp], look: Callable[[Stamp], Found]) -> Freshness:
    """Decide whether an entry is stale, given what is found of its sources.

    Examples
    --------
    >>> stamps = [Stamp("/data/a.nii.gz", (7, 3)), Stamp("/data/b.nii.gz", (9, 4))]
    >>> judge(stamps, lambda one: (7, 5) if one.path == "/data/a.nii.gz" else one.noted)
    Freshness(status='stale', reasons=('/data/a.nii.gz was changed',))
    """
    found = [(one, look(one)) for one in stamps]
    away = [f"{one.path} is out of reach" for one, now in found if now == "out of reach"]
    other = [
        f"{one.path} {'is gone' if now == 'gone' else 'was changed'}"
        for one, now in found
        if now not in ("out of reach", one.noted)
    ]
    if other:
        return Freshness("stale", tuple(other))
    return Freshness("unknown", tuple(away)) if away or not stamps else Freshness("fresh")


class Sources:
    """The source files as they are now; each is asked for once.

    Parameters
    ----------
    root : path, optional
        Where the data lie that a data set was given ``root=`` for; without it they are out of reach.

    Raises
    ------
    CacheConfigError
        `root` is no folder.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self._root = None if root is None else Path(root)
        if self._root is not None and not self._root.is_dir():
            raise CacheConfigError(f"root {self._root} is not a folder: give the one that the source files lie in")
        self._found: dict[tuple[Path, int], Found] = {}
        self._folders: dict[Path, bool] = {}

    def look(self, one: Stamp) -> Found:
        """Return what there is now in the place of what an entry was made from."""
        place = self._place(one.path)
        if place is None:
            return "out of reach"
        most = one.noted[0] if isinstance(one.noted[1], str) else 0
        if most > _LARGEST:
            return "out of reach"
        known = place, most
        if known not in self._found:
            self._found[known] = self._look(place, most)
        return self._found[known]

    def _place(self, path: str) -> Path | None:
        if Path(path).is_absolute():
            return Path(path)
        inside = PurePosixPath(path)
        if self._root is None or inside.is_absolute() or ".." in inside.parts:
            return None
        return self._root / inside

    def _look(self, place: Path, most: int) -> Found:
        now = stamp(str(place), most)
        if now is not None:
            return _noted(now)
        try:
            place.stat()
        except FileNotFoundError:
            return "gone" if self._holds_something(place.parent) else "out of reach"
        except (OSError, ValueError):  # no permission, or no path at all
            return "out of reach"
        return "out of reach"  # a folder in place of a file, a device, a socket: nothing that a key was made from

    def _holds_something(self, folder: Path) -> bool:
        known = self._folders.get(folder)
        if known is None:
            try:
                with os.scandir(folder) as inside:
                    known = next(inside, None) is not None
            except OSError:
                known = False
            self._folders[folder] = known
        return known
