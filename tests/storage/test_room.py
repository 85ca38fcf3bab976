"""How much memory may be used, and what goes for what: a pure plan, and the numbers that Linux tells."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcache.storage.room import Held, available_memory_bytes, plan_room, spare_bytes

MIB = 2**20


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=12),
    st.integers(1, 100),
    st.integers(1, 300),
    st.integers(0, 21),
)
def test_the_plan_is_that_of_giving_up_one_by_one(sizes, need, limit, since):
    held = [Held(str(i), n, used) for i, (n, used) in enumerate(sizes)]
    chosen = plan_room(held, need, limit, since)
    left = sorted(held, key=lambda one: one.used_ns)
    gone = []
    while sum(one.nbytes for one in left) + need > limit and left and left[0].used_ns < since:
        gone.append(left.pop(0))
    if sum(one.nbytes for one in left) + need > limit:
        assert chosen is None
    else:
        assert chosen is not None
        assert sorted(one.used_ns for one in chosen) == [one.used_ns for one in gone]
        assert sum(one.nbytes for one in held) - sum(one.nbytes for one in chosen) + need <= limit


@pytest.mark.parametrize(("size", "spare"), [(0, 0), (64, 32), (1024, 512), (2048, 512), (64 * 1024, 8 * 1024)])
def test_others_keep_half_of_a_small_file_system_and_an_eighth_of_a_large_one(size, spare):
    assert spare_bytes(size * MIB) == spare * MIB


def machine(tmp_path, available_kb=8_000_000, cgroup="", groups=()):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 16000000 kB\nMemAvailable: {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for path, files in dict(groups).items():
        (cgroups / path).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (cgroups / path / name).write_text(str(value))
    return proc, cgroups


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    assert available_memory_bytes(*machine(tmp_path)) == 8_000_000 * 1024
    assert 0 < available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_limit_of_any_control_group_above_counts_version_2(tmp_path):
    groups = {
        "a": {"memory.max": 3_000_000_000, "memory.current": 1_000_000_000},
        "a/b": {"memory.max": "max", "memory.current": 5},
    }
    assert available_memory_bytes(*machine(tmp_path, cgroup="0::/a/b\n", groups=groups)) == 2_000_000_000


def test_files_that_the_kernel_would_drop_are_available(tmp_path):
    files = {"memory.max": 3_000_000, "memory.current": 2_900_000, "memory.stat": "anon 5\ninactive_file 900000\n"}
    found = available_memory_bytes(*machine(tmp_path, cgroup="0::/\n", groups={"": files}))
    assert found == 1_000_000


def test_version_1(tmp_path):
    files = {"memory.limit_in_bytes": 5_000_000, "memory.usage_in_bytes": 4_000_000}
    found = available_memory_bytes(*machine(tmp_path, cgroup="4:memory:/x\n0::/\n", groups={"memory/x": files}))
    assert found == 1_000_000


def test_without_proc_it_is_half_of_all_memory(tmp_path):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") == whole // 2
