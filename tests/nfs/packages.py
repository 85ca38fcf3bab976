"""The Debian packages that the lab is made of: where they are, what is missing, how to get them without installing.

They may be installed, or lie unpacked in ``build/nfs``, where ``python -m tests.nfs.packages`` puts them: an NFS
server that is installed starts with the machine, which nobody wants of a test.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGES", "UNPACKED", "fetch", "find", "missing"]

PACKAGES = {
    "user-mode-linux": "linux.uml",
    "nfs-kernel-server": "rpc.nfsd",
    "rpcbind": "rpcbind",
    "iproute2": "ip",
    "kmod": "kmod",
    "e2fsprogs": "mkfs.ext4",
}
"""Debian package → the program that shows that it is there."""

UNPACKED = Path(__file__).parents[2] / "build" / "nfs"

_FOLDERS = ("usr/bin", "bin", "usr/sbin", "sbin")


def find(relative: str) -> Path | None:
    """Find a program or a file of the packages."""
    names = [Path(relative)] if "/" in relative else [Path(folder, relative) for folder in _FOLDERS]
    paths = [root / name for root in (UNPACKED / "root", Path("/")) for name in names]
    return next((path for path in paths if path.exists()), None)


def missing() -> str:
    """Say why the lab cannot run here, or return an empty string."""
    reasons = []
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        reasons.append("Linux on x86-64")
    if os.geteuid() != 0:
        reasons.append("root")
    absent = [package for package, program in PACKAGES.items() if find(program) is None]
    if absent:
        reasons.append(f"the Debian packages {' '.join(absent)} (`make test-nfs` gets them)")
    return "tests on real NFS need " + " and ".join(reasons) if reasons else ""


def fetch() -> None:
    """Download the packages that are neither installed nor fetched yet, and unpack them; install nothing."""
    if all(find(program) is not None for program in PACKAGES.values()):
        return
    archives = UNPACKED / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    where = ["-o", f"Dir::Cache::archives={archives}", "-o", "APT::Sandbox::User=root"]
    command = ["apt-get", "install", "-qq", "--yes", "--download-only", "--no-install-recommends", *where, *PACKAGES]
    if subprocess.run(command, check=False).returncode:  # the lists may be old
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(command, check=True)
    draft = UNPACKED / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, draft], check=True)
    draft.rename(UNPACKED / "root")
    shutil.rmtree(archives)


if __name__ == "__main__":
    fetch()
