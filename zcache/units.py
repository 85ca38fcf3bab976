"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Final

from zcache.errors import CacheConfigError

__all__ = ["parse_bytes"]

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: int | str, name: str = "value") -> int:
    """Read a number of bytes such as ``2_000_000``, ``"512MiB"`` or ``"1.5 GB"`` (units are powers of 1024).

    Raises
    ------
    CacheConfigError
        Not a positive number of bytes.

    Examples
    --------
    >>> parse_bytes("1GiB")
    1073741824
    """
    number: float = 0.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        if match is not None:
            number = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number < 1:
        raise CacheConfigError(f"{name}={value!r} is not a number of bytes such as 1073741824 or '1GiB'")
    return int(number)
