"""Files and folders that items and transforms name: what tells one version of them from another.

Size and modification time, which cost no more than a question to the file system. Two files can share both: those that
were unpacked or synchronised together often do. So where the text of a path does not say which file it is (a relative
path, a symbolic link on the way), a sample of the content counts as well, and the text of the links. No inode and no
resolved path does: they differ between hosts that share a cache.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath

from zcache.keys.values import Json, canonical_json, digest

__all__ = ["content_sample", "looks_like_path", "may_be_path", "rooted", "shown", "source_form", "stamp", "status_of"]

_SEPARATORS = tuple(separator for separator in (os.sep, os.altsep, "/") if separator)
_LONGEST_PATH = 4096
_PATH_LIKE = re.compile(r"[^\r\n\0]*\.[A-Za-z0-9]{1,8}")
_BLOCK_BYTES = 4096
_BLOCKS = 8  # of a file that is not compressed: two segmentations begin and end alike
_MOST_LINKS = 40  # as Linux
_MOST_REMEMBERED = 1 << 17

_samples: dict[tuple[int, ...], str] = {}


def source_form(value: str | os.PathLike[str], base: str | None, *, folders: bool = True) -> Json | None:
    """Describe the file or folder that a string or path names.

    Parameters
    ----------
    value : str or os.PathLike
        A path, relative to the working directory or absolute.
    base : str or None
        The absolute path that paths inside of it are shown relative to.
    folders : bool
        Whether a folder counts, with all that is in it; never for a string without a separator.

    Returns
    -------
    Json or None
        None if it names neither.
    """
    text = os.fsdecode(value)
    status = status_of(text)
    if status is None:
        return None
    is_folder = stat.S_ISDIR(status.st_mode) and folders and may_be_path(value, text)
    if not (is_folder or stat.S_ISREG(status.st_mode)):
        return None
    told = shown(value, text, base)
    inside = isinstance(told, list) and told[0] == "rooted"
    links = _links(text, base if inside else None)
    ambiguous = bool(_links(str(base), None)) if inside else not os.path.isabs(text)  # noqa: PTH117 - text
    sampled = ambiguous or bool(links)
    way: list[Json] = [links] if links else []
    if is_folder:
        listing = sorted(_listing(text, sampled=sampled), key=canonical_json)
        return ["folder", told, len(listing), digest(listing), *way]
    sample: list[Json] = [content_sample(text, status)] if sampled else []
    return ["file", told, status.st_size, status.st_mtime_ns, *sample, *way]


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
    status = status_of(path)
    if status is not None and stat.S_ISREG(status.st_mode):
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if status is not None and stat.S_ISDIR(status.st_mode) and most != 0:
        listing = sorted(islice(_listing(path), None if most is None else most + 1), key=canonical_json)
        return {"entries": len(listing), "digest": digest(listing)}
    return None


def content_sample(path: str, status: os.stat_result) -> str | None:
    """Hash some of the bytes of a file; all of them if it is short.

    Of a .gz file the first and last 4 KiB, since it ends with a checksum of all; of others eight blocks of as many from
    the first to the last. Remembered per device, inode, size and times, so that a process reads a file once.

    Parameters
    ----------
    path : str
        The file.
    status : os.stat_result
        Of it.

    Returns
    -------
    str or None
        32 hexadecimal digits; None if it cannot be read.
    """
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if version not in _samples:
        if len(_samples) >= _MOST_REMEMBERED:
            _samples.clear()
        blocks = 2 if path.endswith(".gz") else _BLOCKS
        last = status.st_size - _BLOCK_BYTES
        hashed = blake2b(digest_size=16)
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - text
                if last <= blocks * _BLOCK_BYTES:
                    hashed.update(file.read())
                else:
                    for at in range(blocks):
                        file.seek(last * at // (blocks - 1))
                        hashed.update(file.read(_BLOCK_BYTES))
        except OSError:
            return None
        _samples[version] = hashed.hexdigest()
    return _samples[version]


def shown(value: object, text: str, base: str | None) -> Json:
    """Write a string or path as it is, or relative to the root where it lies inside."""
    kind = "str" if isinstance(value, str) else "path"
    inside = rooted(text, base)
    if inside is not None:
        return ["rooted", kind, inside]
    return text if kind == "str" else ["path", PurePath(text).as_posix()]


def rooted(text: str, base: str | None) -> str | None:
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


def may_be_path(value: object, text: str) -> bool:
    """Tell whether a value is more than a word: a path object, or text with a separator in it."""
    return not isinstance(value, str) or any(separator in text for separator in _SEPARATORS)


def looks_like_path(text: str) -> bool:
    """Tell whether text ends as the name of a file does."""
    return len(text) <= _LONGEST_PATH and _PATH_LIKE.fullmatch(text) is not None


def status_of(text: str) -> os.stat_result | None:
    """Ask for the status of what text names; None if that is nothing."""
    try:
        return os.stat(text)  # noqa: PTH116 - of text that need not be a path
    except (OSError, ValueError):  # missing, too long, or with characters that no path has
        return None


def _links(text: str, base: str | None) -> list[Json]:
    """Collect the text of the symbolic links on the way to a file, those below the root alone where there is one.

    Of a link that leads to an absolute path, the last name: the rest is how this host happens to mount it.
    """
    if base is None:
        top, rest = os.path.splitdrive(os.path.join(os.getcwd(), text))  # noqa: PTH109, PTH118 - with its ".."
        top += os.sep
    else:
        top, rest = base, os.path.relpath(text, base)
    parts = [part for part in reversed(rest.split(os.sep)) if part]  # noqa: PTH206 - a stack of text
    found: list[Json] = []
    while parts:
        part = parts.pop()
        here = os.path.dirname(top) if part == os.pardir else os.path.join(top, part)  # noqa: PTH118, PTH120 - as above
        try:
            if part in (os.pardir, os.curdir) or not stat.S_ISLNK(os.lstat(here).st_mode):
                top = here if part != os.curdir else top
                continue
            target = os.readlink(here)  # noqa: PTH115 - as above
        except OSError:
            return found
        if len(found) == _MOST_LINKS:
            return found
        if os.path.isabs(target):  # noqa: PTH117 - as above
            found.append(os.path.basename(target.rstrip(os.sep)))  # noqa: PTH119 - as above
            if base is not None and rooted(target, base) is None:
                return found  # outside of the root, hosts differ
            top = os.path.splitdrive(target)[0] + os.sep
        else:
            found.append(PurePath(target).as_posix())
        parts += [name for name in reversed(target.split(os.sep)) if name]  # noqa: PTH206 - as above
    return found


def _listing(folder: str, *, sampled: bool = False) -> Iterator[Json]:
    """List all that is in a folder: relative name, size and modification time; links to folders by their text."""
    for directory, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(directory, name)  # noqa: PTH118 - a DICOM series has thousands
            status = status_of(path)
            size: list[Json] | None = None
            if status is not None and stat.S_ISREG(status.st_mode):
                size = [status.st_size, status.st_mtime_ns]
                if sampled or os.path.islink(path):  # noqa: PTH114 - as above
                    size.append(content_sample(path, status))
            elif os.path.islink(path):  # noqa: PTH114 - as above
                size = [PurePath(os.readlink(path)).as_posix()]  # noqa: PTH115 - as above
            yield [PurePath(os.path.relpath(path, folder)).as_posix(), size]
