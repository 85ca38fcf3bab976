"""How much memory may be used, and what has to go so that something else fits: numbers in, numbers out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Held", "available_memory_bytes", "plan_room", "spare_bytes"]

_USUAL_SPARE_BYTES: Final = 512 * 1024 * 1024
_SPARE_PART: Final = 8


@dataclass(frozen=True, slots=True)
class Held:
    """A file that is held in memory.

    Attributes
    ----------
    name : str
        Of the file.
    nbytes : int
        What it takes.
    used_ns : int
        When it was last read, in nanoseconds since the epoch.
    """

    name: str
    nbytes: int
    used_ns: int


def plan_room(held: Iterable[Held], need_bytes: int, limit_bytes: int, unused_since_ns: int) -> list[Held] | None:
    """Choose what goes so that something else fits: what was not read for longest.

    Parameters
    ----------
    held : iterable of Held
        What is there.
    need_bytes, limit_bytes : int
        Size of what is to come, and of all together at most.
    unused_since_ns : int
        What was read since then stays. A training reads every item once per epoch: with more items than fit, giving up
        what was used least recently without asking whether it will be wanted again would keep nothing until its turn.

    Returns
    -------
    list of Held or None
        None if it cannot fit.

    Examples
    --------
    >>> held = [Held("a", 60, 1), Held("b", 30, 2)]
    >>> [one.name for one in plan_room(held, 50, 100, unused_since_ns=2)]
    ['a']
    >>> plan_room(held, 50, 100, unused_since_ns=1) is None
    True
    """
    oldest_first = sorted(held, key=lambda one: one.used_ns)
    excess = sum(one.nbytes for one in oldest_first) + need_bytes - limit_bytes
    chosen: list[Held] = []
    for one in oldest_first:
        if excess <= 0 or one.used_ns >= unused_since_ns:
            break
        chosen.append(one)
        excess -= one.nbytes
    return chosen if excess <= 0 else None


def spare_bytes(file_system_bytes: int) -> int:
    """Return how much of a file system in memory is left to others: half of a small one, an eighth of a large one.

    PyTorch's DataLoader passes batches from its workers through the same file system, and dies with a bus error where
    it is full.
    """
    return max(file_system_bytes // _SPARE_PART, min(file_system_bytes // 2, _USUAL_SPARE_BYTES))


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that programs could still get without swapping, that of this container's limit if it has one.

    Parameters
    ----------
    proc, cgroups : path
        Where Linux says so (``MemAvailable`` of proc(5); ``memory.max`` and ``memory.current`` of cgroup version 2,
        ``memory.limit_in_bytes`` and ``memory.usage_in_bytes`` of version 1). Elsewhere it is a half of all memory.
    """
    found = [_left_of_machine(proc)]
    for group in _groups(proc, cgroups):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            at_most, used = _number(group / limit), _number(group / usage)
            if at_most is not None and used is not None:
                found.append(max(0, at_most - used + _reclaimable(group)))
    return min(found)


def _left_of_machine(proc: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_bytes().decode("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the directories of this process's control groups and of those above them."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_bytes().decode("ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            mount = cgroups / controllers if controllers else cgroups
            own = mount / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(mount))]
    return found


def _reclaimable(group: Path) -> int:
    """Return the bytes of files that the kernel would drop first; they count as used."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (group / "memory.stat").read_bytes().decode("ascii").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_bytes().decode("ascii"))
    except (OSError, ValueError):  # "max": no limit
        return None
