from __future__ import annotations

import errno
import warnings

import pytest

from zcache.errors import CacheWriteError, EntryDamagedError, UnstorableError, ZCacheWarning
from zcache.troubles import Troubles, skip_reason


def first_of_kind():
    seen = set()
    return lambda kind: not (kind in seen or seen.add(kind))


def test_each_kind_is_warned_of_once_when_it_is_asked_for():
    troubles = Troubles(first_of_kind(), raising=False)
    for text in ("first", "second"):
        troubles.note("no_space", text, OSError(errno.ENOSPC, "full"))
    troubles.note("damaged", "third", EntryDamagedError("torn"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        troubles.report()
        troubles.report()
    assert [str(w.message).split(":")[0] for w in heard] == ["first", "third"]
    assert {w.category for w in heard} == {ZCacheWarning}


def test_an_error_without_a_text_is_told_by_its_type():
    troubles = Troubles(first_of_kind(), raising=False)
    troubles.note("memory", "the item", MemoryError())
    with pytest.warns(ZCacheWarning, match="the item: MemoryError"):
        troubles.report()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EROFS, "read-only"), CacheWriteError),
        (UnstorableError("x"), UnstorableError),
        (EntryDamagedError("y"), EntryDamagedError),
    ],
)
def test_raising_raises_every_one(error, raised):
    troubles = Troubles(first_of_kind(), raising=True)
    for _ in range(2):
        troubles.note("any", "text", error)
        with pytest.raises(raised):
            troubles.report()
        troubles.report()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EDQUOT, ""), "no_space"),
        (OSError(errno.EROFS, ""), "read_only"),
        (PermissionError(errno.EACCES, ""), "permission"),
        (OSError(errno.ESTALE, ""), "io_error"),
        (MemoryError(), "memory"),
        (UnstorableError(), "unstorable"),
        (KeyError(), "internal"),
    ],
)
def test_reasons(error, reason):
    assert skip_reason(error) == reason
