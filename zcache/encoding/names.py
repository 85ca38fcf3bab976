"""Names of the Zarr arrays of an entry, taken from the places of the arrays in the item."""

from __future__ import annotations

import re

__all__ = ["NameAllocator", "is_array_name"]

_MAX_LENGTH = 80
_SUBSCRIPT = re.compile(r"\[('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


class NameAllocator:
    """Turns paths such as ``['image'].meta['mask']`` into distinct names such as ``image.meta.mask``.

    Names consist of ASCII letters, digits, ``.``, ``_`` and ``-``, begin with a letter or digit, and stay distinct
    on file systems that ignore case.

    Examples
    --------
    >>> names = NameAllocator()
    >>> names.allocate("['image']"), names.allocate("['IMAGE']"), names.allocate("")
    ('image', 'IMAGE-2', 'array')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def allocate(self, path: str) -> str:
        """Return a name for the array at `path` that no earlier call returned."""
        dotted = _SUBSCRIPT.sub(lambda m: "." + m.group(1).strip("'\""), path)
        plain = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.-]+", "_", dotted))
        base = plain.strip("._-")[:_MAX_LENGTH] or "array"
        if base.lower() in {"zarr.json", "c", "labels"}:  # names that Zarr and OME-Zarr use inside a group
            base = f"{base}-array"
        name, n = base, 1
        while name.lower() in self._taken:
            n += 1
            name = f"{base}-{n}"
        self._taken.add(name.lower())
        return name


def is_array_name(name: str) -> bool:
    """Whether `name` could come from a `NameAllocator`: a plain file name, never a path.

    Examples
    --------
    >>> is_array_name("image.meta.mask"), is_array_name("../image"), is_array_name("zarr.json")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None and ".." not in name and name.lower() not in {"zarr.json", "c"}
