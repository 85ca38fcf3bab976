"""What a benchmark's figures depend on beside the code."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zcache

_CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """Return the processor's name as the system gives it."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(packages: Iterable[str]) -> dict[str, Any]:
    """Return processor, load and versions; no names and no paths of the machine."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "zcache": zcache.__version__,
    }


def sentence(facts: dict[str, Any]) -> str:
    """Return an environment as one line of text."""
    return ", ".join(f"{name}: {value}" for name, value in facts.items())
