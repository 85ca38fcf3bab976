"""What somebody else does to a cache or to the server: remove, damage, age, fill the disk, restart."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from pathlib import Path

from tests.nfs.guest.items import key
from tests.nfs.guest.server import EXPORT, restart, stop

_DAY_S = 24 * 3600.0
_HOG = EXPORT / "hog"
_BLOCK_BYTES = 4096


def now() -> float:
    """Return the clock that all machines share: they are one kernel."""
    return time.monotonic()


def restart_server(down_s: float, grace_s: float | None) -> None:
    restart(down_s, grace_s)


def folder(name: str) -> None:
    """Make a folder on the server."""
    (EXPORT / name).mkdir()


def clear(name: str) -> None:
    shutil.rmtree(EXPORT / name)


def take_away(cache_dir: str, number: int, how: str) -> bool:
    """Remove an entry by renaming it away first, or as ``rm -r`` does; return whether it was there."""
    path = Path(cache_dir, "cache.zarr", key(number))
    try:
        if how == "rename":
            away = Path(cache_dir, f"removed-{uuid.uuid4().hex}")
            path.rename(away)
            path = away
        shutil.rmtree(path)
    except FileNotFoundError:
        return False
    except OSError:  # another host is writing or has a file open
        shutil.rmtree(path, ignore_errors=True)
    return True


def damage(cache_dir: str, number: int, how: str) -> None:
    """Damage an entry: flip a bit of a chunk, cut its document, cut or lose a shard."""
    entry = Path(cache_dir, "cache.zarr", key(number))
    if how == "document":
        os.truncate(entry / "zarr.json", 100)
        return
    shard = max((p for p in entry.rglob("*") if p.is_file() and p.name != "zarr.json"), key=lambda p: p.stat().st_size)
    if how == "lost":
        shard.unlink()
    elif how == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        with shard.open("r+b") as f:
            f.seek(40)
            byte = f.read(1)[0]
            f.seek(40)
            f.write(bytes([byte ^ 16]))


def listing(cache_dir: str) -> list[str]:
    """Return everything in a cache that is no part of a published entry: leftovers."""
    root = Path(cache_dir)
    found = [p for name in (".", "staging") for p in (root / name).glob("*")]
    found += root.rglob(".nfs*")
    plain = {root / "staging", root / "cache.zarr"}
    return sorted({str(p.relative_to(root)) for p in found} - {str(p.relative_to(root)) for p in plain})


def age(cache_dir: str, name: str) -> None:
    """Make something look as if it had been left there two days ago."""
    past = time.time() - 2 * _DAY_S
    os.utime(Path(cache_dir, name), (past, past))


def can_lock(folder: str) -> bool:
    """Try to lock a file."""
    with Path(folder, "lock").open("w") as f:
        try:
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            Path(f.name).unlink()
    return True


def stop_server() -> None:
    stop()


def chmod(name: str, mode: int, gid: int) -> None:
    os.chown(EXPORT / name, 0, gid)
    (EXPORT / name).chmod(mode)


def fill_disk() -> None:
    """Take all room on the server's disk."""
    with _HOG.open("wb") as f:
        step = 256 * 2**20
        while step >= _BLOCK_BYTES:
            try:
                os.posix_fallocate(f.fileno(), f.seek(0, os.SEEK_END), step)
            except OSError:
                step //= 2


def free_disk() -> None:
    _HOG.unlink()
