"""A server that goes away and comes back, or has no room, and users of one group."""

from __future__ import annotations

import pytest

from tests.nfs.conftest import LONG, ROUNDS
from tests.nfs.line import StuckError

_DOWN_S = 2.0
_GRACE_S = 20.0


def test_the_server_is_restarted_in_between(nfs, mount):
    numbers = list(range(8 * ROUNDS))
    a, b = nfs.worker("a"), nfs.worker("b")
    seconds = 8.0 if LONG else 3.0
    calls = [a.start("put", numbers=numbers), b.start("read_and_fill", numbers=numbers, seconds=seconds)]
    for _ in range(2 if LONG else 1):
        nfs.server.do("restart_server", down_s=_DOWN_S, grace_s=None if LONG else 1.0)
    nfs.together(calls, allowed_s=seconds + 2 * _GRACE_S)
    nfs.together([worker.start("fill", numbers=numbers) for worker in (a, b)], allowed_s=_GRACE_S)
    assert nfs.tell(nfs.server, "read", numbers=numbers) == len(numbers)
    nfs.check(warnings=2)


def test_case_18_the_servers_disk_is_full(nfs, mount):
    worker = nfs.worker("a")
    nfs.tell(worker, "put", numbers=[0])
    nfs.server.do("fill_disk")
    try:
        nfs.tell(worker, "put", numbers=[1, 2])
        refused = nfs.counts.pop("skipped: no_space")
        assert nfs.tell(worker, "read", numbers=[0]) == 1
    finally:
        nfs.server.do("free_disk")
    assert refused == 2
    assert nfs.count("written") == 1
    nfs.tell(worker, "put", numbers=[1, 2])
    nfs.tell(worker, "close")
    assert nfs.leftovers() == []
    assert nfs.tell(nfs.server, "read", numbers=[0, 1, 2]) == 3
    nfs.check(warnings=1)


def test_case_37_users_of_one_group_share_a_cache(nfs, mount):
    group = 4000
    nfs.server.do("chmod", name=nfs.name, mode=0o2775, gid=group)
    first = nfs.worker("a", uid=4001, gid=group, umask=0o002)
    second = nfs.worker("b", uid=4002, gid=group, umask=0o002)
    stranger = nfs.worker("b", uid=4003, gid=4003, umask=0o022)
    nfs.tell(first, "put", numbers=[0, 1])
    assert nfs.tell(second, "read", numbers=[0, 1]) == 2
    nfs.ask(nfs.server, "damage", number=0, how="flip")
    healer = nfs.worker("b", uid=4002, gid=group, umask=0o002)  # a client need not look again at what it has open
    nfs.tell(healer, "fill", numbers=[0, 1, 2], generation=1)
    assert nfs.count("healed") == 1
    assert nfs.tell(first, "read", numbers=[2]) == 1
    assert nfs.tell(stranger, "read", numbers=[1]) == 1
    nfs.tell(stranger, "put", numbers=[3])
    assert nfs.counts.pop("skipped: permission") == 1
    nfs.tell(first, "close")
    nfs.tell(healer, "close")
    modes = nfs.tell(nfs.server, "modes")
    assert {gid for _, _, gid in modes.values()} == {group}
    assert {mode for is_folder, mode, _ in modes.values() if is_folder} == {0o2775}
    assert {mode for is_folder, mode, _ in modes.values() if not is_folder} == {0o664}
    nfs.check(warnings=2)


@pytest.mark.skipif(not LONG, reason="the lab has to be started anew afterwards")
def test_a_host_that_hangs_is_told_with_its_stacks(nfs):
    worker = nfs.worker("a")
    nfs.tell(worker, "put", numbers=[0])
    nfs.server.do("stop_server")
    with pytest.raises(StuckError) as stuck:
        worker.start("put", numbers=[1]).result(3.0)
    said = str(stuck.value)
    assert "no answer in time from a: put" in said
    assert "in do_put" in said  # Python's side
    assert "rpc_" in said  # the kernel's
