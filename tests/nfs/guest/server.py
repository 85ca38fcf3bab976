"""The NFS server of the lab: the kernel's own, started and restarted with Debian's programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.nfs.guest import linux

EXPORT = Path("/mnt/export")
MOUNTD_PORT = 20048

_OPTIONS = "rw,no_root_squash,no_subtree_check,insecure,sync,fsid=0"
_NFSD = ("rpc.nfsd", "-L", "10", "-G", "10", "8")  # lease and grace as short as they can be
_COMMAND_S = 60


def program(name: str, *arguments: str) -> None:
    """Run one of the packages' programs; they may lie unpacked in a folder instead of being installed."""
    prefix = os.environ["LAB_PACKAGES"].rstrip("/")
    path = ":".join(f"{p}{where}" for p in (prefix, "") for where in ("/usr/sbin", "/sbin", "/usr/bin", "/bin"))
    libraries = ":".join(f"{prefix}{where}/x86_64-linux-gnu" for where in ("/usr/lib", "/lib"))
    command = [shutil.which(name, path=path) or name, *arguments]
    if name == "modprobe":
        command = [shutil.which("kmod", path=path) or name, *arguments]
    done = subprocess.run(
        [name, *command[1:]],
        executable=command[0],  # kmod does what the name it is called by says
        env={"PATH": path, "LD_LIBRARY_PATH": libraries},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_COMMAND_S,
    )
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}")


def start() -> None:
    program("rpcbind", "-w")
    linux.mount("nfsd", "/proc/fs/nfsd", "nfsd")
    program("exportfs", "-o", _OPTIONS, f"*:{EXPORT}")
    program("rpc.mountd", "-p", str(MOUNTD_PORT))
    program(*_NFSD)
    _end_grace()  # nobody has anything to claim from a server that was never up


def stop() -> None:
    """Leave every client waiting."""
    program("rpc.nfsd", "0")


def restart(down_s: float, grace_s: float | None) -> None:
    """Stop the server with all that it knows of its clients, and start it again after a while.

    For ten seconds it then grants nothing new, so that clients can claim what they had open; `grace_s` cuts that short.
    """
    stop()
    time.sleep(down_s)
    program(*_NFSD)
    if grace_s is not None:
        time.sleep(grace_s)
        _end_grace()


def _end_grace() -> None:
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y", "ascii")
