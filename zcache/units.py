"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Final

from zcache.errors import CacheConfigError

__all__ = ["parse_bytes"]

_EXPONENTS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(value: int | str, name: str = "value") -> int:
    """Read a number of bytes such as ``2_000_000``, ``"512MiB"`` or ``"1.5 GB"``.

    ``MiB`` and a bare ``M`` are powers of 1024, ``MB`` is a power of 1000, as sizes are printed everywhere.

    Raises
    ------
    CacheConfigError
        Not a positive number of bytes.

    Examples
    --------
    >>> parse_bytes("1GiB"), parse_bytes("1GB")
    (1073741824, 1000000000)
    """
    number: float = 0.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(iB|B|)\s*", value, re.IGNORECASE)
        if match is not None:
            step = 1000 if match[3].upper() == "B" else 1024
            number = float(match[1]) * step ** _EXPONENTS[match[2].upper()]
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number < 1:
        raise CacheConfigError(f"{name}={value!r} is not a number of bytes such as 1073741824 or '1GiB'")
    return int(number)
