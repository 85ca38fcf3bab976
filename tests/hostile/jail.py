"""Code that may crash, hang or eat memory: run in a process of its own with limits, judged by how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MIB = 1024 * 1024

_LIMITED = """
import atexit as _atexit, pathlib as _pathlib, resource as _resource
_resource.setrlimit(_resource.RLIMIT_AS, ({memory}, {memory}))
def _report_peak():
    status = _pathlib.Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"peak {int(kib) * 1024}", flush=True)
_atexit.register(_report_peak)
"""


@dataclass(frozen=True)
class Verdict:
    """How a process ended.

    Attributes
    ----------
    how : str
        ``"ended"``, ``"hung"``, the name of the signal that killed it, or ``"failed"`` with an exit status.
    out, err : str
        What it printed.
    peak_bytes : int
        The most memory that it had at a time; 0 unless it ended by itself.
    """

    how: str
    out: str
    err: str
    peak_bytes: int


def run(code: str, *args: object, memory: int = 2048 * MIB, timeout: float = 60) -> Verdict:
    """Run a script with a limit on its address space.

    Parameters
    ----------
    code : str
        A script; `args` are in ``sys.argv``.
    memory : int
        Bytes of address space; an allocation beyond it fails as it would without any memory left.
    timeout : float
        Seconds until it counts as hung.
    """
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _LIMITED.replace("{memory}", str(memory)) + textwrap.dedent(code),
        *map(str, args),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Verdict("hung", out, err, 0)
    if process.returncode < 0:
        return Verdict(signal.Signals(-process.returncode).name, out, err, 0)
    lines = out.splitlines()
    peak = int(lines[-1].removeprefix("peak ")) if lines and lines[-1].startswith("peak ") else 0
    text = "\n".join(lines[:-1]) if peak else out
    return Verdict("ended" if process.returncode == 0 else f"failed {process.returncode}", text.strip(), err, peak)
