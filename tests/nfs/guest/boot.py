"""First process of the guest: its file systems, the NFS server and two client hosts, in one kernel.

Runs as init of a User-Mode-Linux kernel whose root is this machine's own, read-only. Everything that is written goes
to a throw-away disk or to memory, so the end of the kernel process is the end of all mounts, namespaces and servers.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
import traceback
import tty
import uuid
from pathlib import Path

from tests.nfs.guest import linux, server
from tests.nfs.guest.agent import Agent

HOSTS = {"a": 1, "b": 2}

_MODULES = ("veth", "nfsd", "nfsv3", "nfsv4")
_ETC = ("ld.so.cache", "nsswitch.conf", "services", "protocols", "netconfig", "rpc")
_PASSWD = "root:x:0:0::/:/bin/false\n_rpc:x:990:65534::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


def main() -> None:
    """Set everything up, then do the duty of a first process."""
    gc.freeze()  # a collection would touch, and so copy, what every fork shares
    _arrange_files()
    server.program("modprobe", "-d", "/mnt/modules", "-a", *_MODULES)
    linux.set_hostname("server")
    server.start()
    for name, number in HOSTS.items():
        _start_host(name, number)
    if os.fork() == 0:
        _run(Agent("server", _open_line(0), server=""))
    while True:
        os.wait()


def _arrange_files() -> None:
    linux.mount("proc", "/proc", "proc")
    linux.mount("sysfs", "/sys", "sysfs")
    for where in ("/dev/shm", "/run", "/mnt", "/var/lib"):
        linux.mount("tmpfs", where, "tmpfs")
    for where in ("/mnt/tmp", "/mnt/etc", "/mnt/modules/lib", "/run/rpcbind", "/var/lib/nfs/v4recovery"):
        Path(where).mkdir(parents=True)
    Path("/mnt/modules/lib/modules").symlink_to(os.environ["LAB_MODULES"])
    for name in _ETC:
        for source in (Path(os.environ["LAB_PACKAGES"], "etc", name), Path("/etc", name)):
            if source.exists():
                shutil.copy(source, f"/mnt/etc/{name}")
                break
    Path("/mnt/etc/passwd").write_text(_PASSWD, "ascii")
    Path("/mnt/etc/group").write_text(_GROUP, "ascii")
    Path("/mnt/etc/exports").touch()
    for name in ("etab", "rmtab", "state"):
        Path("/var/lib/nfs", name).touch()
    linux.mount("/mnt/etc", "/etc", flags=linux.MS_BIND)
    linux.mount("/dev/ubda", server.EXPORT, "ext4")
    server.EXPORT.chmod(0o1777)


def _start_host(name: str, number: int) -> None:
    """Fork a host: network, hostname, boot id, mounts and process ids of its own."""
    unshared, connected = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWNS)
        os.write(unshared[1], b".")
        os.read(connected[0], 1)
        linux.set_hostname(f"host{name}")
        server.program("ip", "link", "set", "lo", "up")
        server.program("ip", "address", "add", f"10.0.{number}.2/24", "dev", "eth0")
        server.program("ip", "link", "set", "eth0", "up")
        linux.unshare(linux.CLONE_NEWPID)  # the next fork is the first process in a range of its own
        if os.fork() == 0:
            _run(Agent(name, _open_line(number), server=f"10.0.{number}.1"), own_files=True)
        os.wait()
        os._exit(1)
    os.read(unshared[0], 1)
    server.program("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", str(child))
    server.program("ip", "address", "add", f"10.0.{number}.1/24", "dev", f"v{name}")
    server.program("ip", "link", "set", f"v{name}", "up")
    os.write(connected[1], b".")
    for fd in (*unshared, *connected):
        os.close(fd)


def _give_own_files() -> None:
    """Hide from a host what is the server's: its /proc, boot id and, above all, the export."""
    linux.mount("none", "/", flags=linux.MS_REC_PRIVATE)
    linux.mount("proc", "/proc", "proc")
    linux.mount("tmpfs", "/mnt", "tmpfs")
    Path("/mnt/tmp").mkdir()
    boot_id = Path("/mnt/tmp/boot_id")
    boot_id.write_text(f"{uuid.uuid4()}\n", "ascii")
    linux.mount(str(boot_id), "/proc/sys/kernel/random/boot_id", flags=linux.MS_BIND)


def _run(agent: Agent, *, own_files: bool = False) -> None:
    try:
        if own_files:
            _give_own_files()
        agent.serve()
    except BaseException:  # noqa: BLE001 - to the console, the only place there is
        traceback.print_exc()
    os._exit(1)


def _open_line(number: int) -> int:
    """Open a serial line to the tests."""
    fd = os.open(f"/dev/ttyS{number}", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(fd)
    return fd


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - to the console, then off
        traceback.print_exc()
        sys.stderr.flush()
        Path("/proc/sysrq-trigger").write_text("o", "ascii")
        time.sleep(5)
