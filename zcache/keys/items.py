"""What an item of a data set says, and which files it names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from zcache.keys.files import looks_like_path, may_be_path, rooted, shown, source_form, stamp, status_of
from zcache.keys.fingerprint import Canonicaliser
from zcache.keys.values import Json

__all__ = ["item_fingerprint", "source_paths", "source_stamps"]

_ADVICE = "Put plain values, arrays or paths into the item, or pass hash_func= to make the key yourself."


def item_fingerprint(item: object, *, root: str | os.PathLike[str] | None = None, check_sources: bool = True) -> Json:
    """Describe an item of a dataset and the files that it names.

    Every string or path in the item, dictionary keys apart, that names a file counts with the file's size and
    modification time; one that names a folder (a DICOM series, a Zarr array) with those of all that is in it. No file
    is opened. A plain string without a path separator is taken for text if it names a folder. A missing file is not an
    error here: the string alone counts, and the transform that loads it says what is wrong.

    Parameters
    ----------
    item : object
        Any nesting of containers, strings, paths, numbers and arrays; arrays count by content.
    root : str or os.PathLike, optional
        The folder of the data. Paths in it count relative to it, so that hosts that mount it elsewhere share entries.
        Absolute paths are told by their text, relative ones by the file that they name.
    check_sources : bool
        False: the file system is not asked, and an edited file goes unnoticed.

    Returns
    -------
    Json
        Nested lists of str, int, bool and None.

    Raises
    ------
    FingerprintError
        If the item holds something without a stable description.

    Examples
    --------
    >>> item_fingerprint({"image": "/data/a.nii.gz"}, root="/data", check_sources=False)
    ['dict', [['image', ['rooted', 'str', 'a.nii.gz']]]]
    >>> item_fingerprint("no such file")
    'no such file'
    """
    base = None if root is None else os.path.abspath(root)  # noqa: PTH100 - lexical: symbolic links differ between hosts

    def leaf(value: str | os.PathLike[str]) -> Json:
        form = source_form(value, base) if check_sources else None
        if form is not None:
            return form
        # A relative string that names nothing may be any text, such as a fraction: it is not rewritten as a path.
        text = os.fsdecode(value)
        return text if isinstance(value, str) and not os.path.isabs(text) else shown(value, text, base)  # noqa: PTH117

    return Canonicaliser("item", advice=_ADVICE, leaf=leaf).form(item)


def source_paths(item: object) -> tuple[str, ...]:
    """Collect the paths that an item names, to find its entry by its source.

    Parameters
    ----------
    item : object
        An item of a dataset.

    Returns
    -------
    tuple of str
        Paths, strings that name a file or folder, and strings that look like the path of a file; each once, as written.

    Examples
    --------
    >>> source_paths({"image": "/data/a.nii.gz", "label": "/data/a_seg.nii.gz", "patient": "P001"})
    ('/data/a.nii.gz', '/data/a_seg.nii.gz')
    """
    return tuple(dict.fromkeys(text for value, text in _leaves(item, set()) if _names_source(value, text)))


def source_stamps(item: object, *, root: str | os.PathLike[str] | None = None) -> list[Json]:
    """Note what tells the files and folders that an item names from later versions of them, as its key does.

    Parameters
    ----------
    item : object
        An item of a dataset.
    root : str or os.PathLike, optional
        The folder of the data.

    Returns
    -------
    list of Json
        For each file or folder that is there a `stamp` and its ``"path"``: relative to `root` if it lies inside,
        absolute otherwise; with forward slashes.
    """
    base = None if root is None else os.path.abspath(root)  # noqa: PTH100 - as in item_fingerprint
    found: dict[str, Json] = {}
    for value, text in _leaves(item, set()):
        noted = stamp(text, None if may_be_path(value, text) else 0)
        if noted is not None:
            path = rooted(text, base) or PurePath(os.path.abspath(text)).as_posix()  # noqa: PTH100 - links stay
            found[path] = {"path": path, **noted}
    return list(found.values())


def _leaves(item: object, seen: set[int]) -> Iterator[tuple[object, str]]:
    if isinstance(item, str | os.PathLike):
        yield item, os.fsdecode(item)
    elif isinstance(item, Mapping | list | tuple | set | frozenset) and id(item) not in seen:
        seen.add(id(item))
        for part in item.values() if isinstance(item, Mapping) else _in_order(item):
            yield from _leaves(part, seen)


def _in_order(values: Iterable[Any]) -> Iterable[Any]:
    return sorted(values, key=str) if isinstance(values, set | frozenset) else values


def _names_source(value: object, text: str) -> bool:
    if not isinstance(value, str):
        return True
    separated = may_be_path(value, text)
    if separated and looks_like_path(text):
        return True
    status = status_of(text)
    return status is not None and (stat.S_ISREG(status.st_mode) or (separated and stat.S_ISDIR(status.st_mode)))
