"""What the memory benchmark computes from its samples, and how it reads the kernel's account of a process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from benchmarks import memory, node
from benchmarks.peers import MEMORY, MEMORY_UNCOPIED, UNCACHED, ZCACHE_MEMORY


def test_a_page_that_two_processes_map_counts_once(tmp_path: Path) -> None:
    target = tmp_path / "shared"
    target.write_bytes(bytes(4 << 20))
    with target.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        np.frombuffer(mapping, np.uint8).sum()
        reading, writing = os.pipe()
        done, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            bytes(mapping)
            os.write(ready, b"x")
            os.read(reading, 1)
            os._exit(0)
        os.read(done, 1)
        load = node.load([os.getpid()], tmp_path)
        os.write(writing, b"x")
        os.waitpid(pid, 0)
    for fd in (reading, writing, done, ready):
        os.close(fd)
    assert load.mapped_bytes == load.files_bytes == 4 << 20
    assert load.private_bytes > 0


def test_monais_caches_are_what_its_processes_take_more() -> None:
    ours, theirs = node.Load(1000, 40, 50), node.Load(1800, 0, 0)
    assert memory.cached_bytes(ours, 1000) == 50
    assert memory.cached_bytes(theirs, 1000) == 800
    table = memory.node_table({MEMORY.label: [theirs], ZCACHE_MEMORY.label: [ours]}, 50)
    assert "16.00 ×" in table
    assert "1.00 ×" in table


def test_goals_are_ratios_of_medians() -> None:
    later = {MEMORY.label: [30.0], MEMORY_UNCOPIED.label: [12.0], ZCACHE_MEMORY.label: [2.0, 3.0, 9.0]}
    measured = {
        "later": {"spatial": later, "guided": later},
        "copies": [3.0],
        "starts": {UNCACHED.label: [1.0], ZCACHE_MEMORY.label: [1.05]},
        "node": {ZCACHE_MEMORY.label: [node.Load(1, 1, 104)]},
        "narrow_bytes": 100,
    }
    table = memory.goals_table(measured)
    for ratio in ("0.20 ×", "10.00 ×", "4.00 ×", "1.04 ×", "1.05 ×"):
        assert ratio in table
