"""Ages and moments, as people write them."""

from __future__ import annotations

import datetime as dt
import re

from zcache.errors import CacheConfigError

__all__ = ["age_text", "parse_moment"]

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "mo": 30 * 86400, "y": 365 * 86400}
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|w|mo|y)\s*", re.IGNORECASE)
_SHOWN = (("y", 2), ("mo", 2), ("w", 3), ("d", 2), ("h", 2), ("min", 2))


def parse_moment(
    when: dt.datetime | dt.date | dt.timedelta | str, now: dt.datetime, name: str = "value"
) -> dt.datetime:
    """Return a moment: a date, the text of one, or an age that is counted back from now.

    Parameters
    ----------
    when : datetime, date, timedelta or str
        Such as ``"2026-01-31"``, ``"30d"``, ``"12h"``, ``"2w"``, ``"6mo"``. Without a time zone, local time.
    now : datetime
        With time zone.
    name : str
        What is parsed, for the error.

    Raises
    ------
    CacheConfigError
        It is neither.

    Examples
    --------
    >>> now = dt.datetime(2026, 3, 31, tzinfo=dt.UTC)
    >>> parse_moment("30d", now).isoformat(), parse_moment(dt.timedelta(hours=1), now).isoformat()
    ('2026-03-01T00:00:00+00:00', '2026-03-30T23:00:00+00:00')
    """
    if isinstance(when, str):
        age = _AGE.fullmatch(when)
        try:
            when = (
                dt.timedelta(seconds=float(age[1]) * _UNITS[age[2].lower()]) if age else dt.datetime.fromisoformat(when)
            )
        except (ValueError, OverflowError):
            raise CacheConfigError(
                f"{name}={when!r} is neither an age such as 30d, 12h, 2w or 6mo, nor a date such as 2026-01-31"
            ) from None
    if isinstance(when, dt.timedelta):
        try:
            return now - when
        except OverflowError:
            return dt.datetime.min.replace(tzinfo=dt.UTC)
    if not isinstance(when, dt.datetime):
        when = dt.datetime.combine(when, dt.time())
    return when if when.tzinfo else when.astimezone()


def age_text(moment: dt.datetime | None, now: dt.datetime) -> str:
    """Return how long ago something was, roughly.

    Examples
    --------
    >>> now = dt.datetime(2026, 3, 31, tzinfo=dt.UTC)
    >>> [age_text(now - dt.timedelta(**t), now) for t in ({"days": 3}, {"days": 100}, {"minutes": 5}, {"seconds": 9})]
    ['3 d', '3 mo', '5 min', '9 s']
    """
    if moment is None:
        return "?"
    seconds = max(0.0, (now - moment).total_seconds())
    for unit, least in _SHOWN:
        if seconds >= least * _UNITS[unit]:
            return f"{int(seconds // _UNITS[unit])} {unit}"
    return f"{int(seconds)} s"
