"""The few system calls of Linux that Python 3.11 has no function for; each raises OSError as one of ``os`` would."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC_PRIVATE = 0x4000 | (1 << 18)

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    Path(target).is_file() or Path(target).mkdir(parents=True, exist_ok=True)
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments), f"mount {source} on {target} ({options})")


def umount(target: str | Path) -> None:
    _checked(_libc.umount2(os.fsencode(target), 0), f"umount {target}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def set_hostname(name: str) -> None:
    socket.sethostname(name)


# A filter is a program of (code, jump if true, jump if false, value); see seccomp(2).
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARGUMENTS_AT = 0, 16
_SYSCALLS = {"fcntl": 72, "flock": 73, "link": 86, "symlink": 88, "linkat": 265, "symlinkat": 266, "renameat2": 316}
_LOCK_COMMANDS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW and their OFD twins


def refuse_beyond_rename(error: int) -> None:
    """Make this process unable to lock, link, exchange or append: each such call fails with `error` from now on.

    What is left is what every network file system can do: exclusive create, mkdir and rename. x86-64 only.
    """
    code: list[tuple[int, int, int, int]] = []

    def argument(i: int) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * i)

    refuse = (_RETURN, 0, 0, _REFUSE | error)
    number = (_LOAD, 0, 0, _NUMBER_AT)
    code.append(number)
    for name in ("flock", "link", "symlink", "linkat", "symlinkat", "renameat2"):
        code += [(_EQUAL, 0, 1, _SYSCALLS[name]), refuse]
    code += [(_EQUAL, 0, 1 + 2 * len(_LOCK_COMMANDS) + 1, _SYSCALLS["fcntl"]), argument(1)]
    for command in _LOCK_COMMANDS:
        code += [(_EQUAL, 0, 1, command), refuse]
    code.append(number)
    for opening, flags_at in ((2, 1), (257, 2)):  # open, openat
        code += [(_EQUAL, 0, 4, opening), argument(flags_at), (_ANY_BIT, 0, 1, os.O_APPEND), refuse, number]
    code.append((_RETURN, 0, 0, _ALLOW))

    program = b"".join(struct.pack("=HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    _checked(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.prctl(22, 2, ctypes.c_char_p(head), 0, 0), "seccomp")
