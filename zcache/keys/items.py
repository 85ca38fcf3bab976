"""Keys of cache entries: from an item, its source files, a pipeline and a precision to 32 hexadecimal digits."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from typing import Any

from zcache.keys.fingerprint import Canonicaliser
from zcache.keys.values import Json, canonical_json, digest

__all__ = ["entry_key", "item_fingerprint", "source_paths", "source_stamps", "stamp"]

_ADVICE = "Put plain values, arrays or paths into the item, or pass hash_func= to make the key yourself."
_SEPARATORS = tuple(separator for separator in (os.sep, os.altsep, "/") if separator)
_LONGEST_PATH = 4096
_PATH_LIKE = re.compile(r"[^\r\n\0]*\.[A-Za-z0-9]{1,8}")


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

    def leaf(value: str | os.PathLike[Any]) -> Json:
        text = os.fsdecode(value)
        status = _status(text) if check_sources else None
        if status is not None and stat.S_ISREG(status.st_mode):
            return ["file", _shown(value, text, base), status.st_size, status.st_mtime_ns]
        if status is not None and stat.S_ISDIR(status.st_mode) and _may_be_path(value, text):
            listing = sorted(_listing(text), key=canonical_json)
            return ["folder", _shown(value, text, base), len(listing), digest(listing)]
        # A relative string that names nothing may be any text, such as a fraction: it is not rewritten as a path.
        return text if isinstance(value, str) and not os.path.isabs(text) else _shown(value, text, base)  # noqa: PTH117

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
        noted = stamp(text, None if _may_be_path(value, text) else 0)
        if noted is not None:
            path = _rooted(text, base) or PurePath(os.path.abspath(text)).as_posix()  # noqa: PTH100 - links stay
            found[path] = {"path": path, **noted}
    return list(found.values())


def stamp(path: str, most: int | None = None) -> dict[str, int | str] | None:
    """Return what tells a file or folder from later versions of it; None if there is neither. Nothing is opened.

    Parameters
    ----------
    path : str
        Of a file or folder.
    most : int, optional
        So many entries of a folder are looked at; one that holds more gives none of its versions. With 0, folders are
        not looked at.

    Returns
    -------
    dict or None
        ``{"size": …, "mtime_ns": …}`` of a file; ``{"entries": …, "digest": …}``, which cover all that is in it, of a
        folder.
    """
    status = _status(path)
    if status is not None and stat.S_ISREG(status.st_mode):
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if status is not None and stat.S_ISDIR(status.st_mode) and most != 0:
        listing = sorted(islice(_listing(path), None if most is None else most + 1), key=canonical_json)
        return {"entries": len(listing), "digest": digest(listing)}
    return None


def entry_key(*, format: int, item: Json, pipeline: Json, precision: str) -> str:  # noqa: A002 - the name in the store
    """Make the key of a cache entry.

    Parameters
    ----------
    format : int
        The version of the format on disk.
    item : Json
        From `item_fingerprint`, or what the user's ``hash_func`` gave.
    pipeline : Json
        From `fingerprint`, or its `digest`, which makes the key of many items faster.
    precision : str
        The precision policy.

    Returns
    -------
    str
        32 hexadecimal digits: 128-bit BLAKE2b of the canonical JSON of all four.

    Examples
    --------
    >>> entry_key(format=1, item="a.nii.gz", pipeline=["list", []], precision="lossless")
    'fca6eb946d25b1d79d48dba55ce0fe0e'
    """
    return digest({"format": format, "item": item, "pipeline": pipeline, "precision": precision})


def _may_be_path(value: object, text: str) -> bool:
    return not isinstance(value, str) or any(separator in text for separator in _SEPARATORS)


def _shown(value: object, text: str, base: str | None) -> Json:
    """Write a string or path as it is, or relative to the root where it lies inside."""
    kind = "str" if isinstance(value, str) else "path"
    inside = _rooted(text, base)
    if inside is not None:
        return ["rooted", kind, inside]
    return text if kind == "str" else ["path", PurePath(text).as_posix()]


def _rooted(text: str, base: str | None) -> str | None:
    """Return a path relative to the root, None if it does not lie inside."""
    if base is None:
        return None
    absolute = os.path.abspath(text)  # noqa: PTH100 - as the root
    try:
        if os.path.commonpath([os.path.normcase(base), os.path.normcase(absolute)]) != os.path.normcase(base):
            return None
    except ValueError:  # another drive
        return None
    return PurePath(os.path.relpath(absolute, base)).as_posix()


def _status(text: str) -> os.stat_result | None:
    try:
        return os.stat(text)  # noqa: PTH116 - of text that need not be a path
    except (OSError, ValueError):  # missing, too long, or with characters that no path has
        return None


def _listing(folder: str) -> Iterator[Json]:
    """List all that is in a folder: relative name, size and modification time; links to folders are not followed."""
    for directory, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(directory, name)  # noqa: PTH118 - a DICOM series has thousands
            status = _status(path)
            regular = status is not None and stat.S_ISREG(status.st_mode)
            size = [status.st_size, status.st_mtime_ns] if status is not None and regular else None
            yield [PurePath(os.path.relpath(path, folder)).as_posix(), size]


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
    separated = _may_be_path(value, text)
    if separated and len(text) <= _LONGEST_PATH and _PATH_LIKE.fullmatch(text):
        return True
    status = _status(text)
    return status is not None and (stat.S_ISREG(status.st_mode) or (separated and stat.S_ISDIR(status.st_mode)))
