"""Is a cache sound: every byte of every entry is read and checked, and what cannot be trusted is named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zcache.encoding.array_layout import ArrayRecord, array_document, array_parts
from zcache.encoding.layout import DOCUMENT, MAX_DOCUMENT_BYTES, EntryRecord, group_document, parse_entry
from zcache.encoding.payload import Json
from zcache.encoding.places import array_places
from zcache.errors import EntryDamagedError
from zcache.inspection.listing import INDEX_PREFIX, Status
from zcache.storage import files
from zcache.storage.reader import Shard
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads

if TYPE_CHECKING:
    from zcache.inspection.view import CacheView

__all__ = ["Finding", "Verdict", "repair", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    Attributes
    ----------
    where : str
        Name of the array or index of voxels; empty for the entry as a whole.
    problem : str
        What is wrong, in words.
    in_index : bool
        Only an index of voxels is concerned: the entry itself can be used.
    """

    where: str
    problem: str
    in_index: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of checking one entry.

    Attributes
    ----------
    key : str
        The entry.
    status : str
        ``"ok"`` also if only an index of voxels is damaged.
    findings : tuple of Finding
        Empty if all is well.
    checked_bytes : int
        Bytes that were read.
    document : bytes
        The entry's document as it was checked; tells whether it was replaced since.
    """

    key: str
    status: Status
    findings: tuple[Finding, ...] = ()
    checked_bytes: int = 0
    document: bytes = b""

    def to_json(self) -> Json:
        """Return it as JSON."""
        found = [{"where": f.where, "problem": f.problem} for f in self.findings]
        return {"key": self.key, "status": self.status, "findings": found, "checked_bytes": self.checked_bytes}


def verify(view: CacheView, n_threads: int = 1) -> Iterator[Verdict]:
    """Check the entries of a cache one after the other. Those that are removed meanwhile are passed over.

    Parameters
    ----------
    view : CacheView
        Which entries.
    n_threads : int
        Threads that decode chunks.
    """
    threads = ReadThreads(n_threads)
    for key in view:
        info = view[key].info
        if info.status == "gone":
            continue
        if info.status != "ok":
            yield Verdict(key, info.status, (Finding("", info.problem),), document=_document(view.store, key))
            continue
        verdict = _checked(view.store, key, threads)
        if verdict.status != "ok" and _document(view.store, key) != verdict.document:
            verdict = _checked(view.store, key, threads)  # it was replaced while it was read
        if verdict.status != "gone":
            yield verdict


def repair(store: Store, verdict: Verdict) -> list[str]:
    """Remove what is damaged, so that it is computed anew; say what was removed.

    Only damaged entries and damaged indexes go. Entries of another format, unreadable and foreign ones stay, and so
    does an entry that was replaced since it was checked.

    Raises
    ------
    OSError
        The file system refuses.
    """
    if _document(store, verdict.key) != verdict.document:
        return []
    if verdict.status == "damaged":
        store.remove(verdict.key)
        return [verdict.key]
    removed = []
    for name in dict.fromkeys(f.where for f in verdict.findings if f.in_index):
        store.remove(verdict.key, name)
        removed.append(f"{verdict.key}/{name}")
    return removed


def _document(store: Store, key: str) -> bytes:
    try:
        return store.read_document(key)
    except OSError:
        return b""


def _checked(store: Store, key: str, threads: ReadThreads) -> Verdict:
    document = b""
    try:
        document = store.read_document(key)
        record = parse_entry(document)
        array_places(record.tree)
    except FileNotFoundError:
        gone = not files.exists(store.entry_path(key))
        return Verdict(key, "gone" if gone else "damaged", (Finding("", f"it has no {DOCUMENT}"),))
    except EntryDamagedError as e:
        return Verdict(key, "damaged", (Finding("", str(e)),), document=document)
    except OSError as e:
        return Verdict(key, "unreadable", (Finding("", e.strerror or str(e)),), document=document)
    findings, status = [], "ok"
    nbytes = len(document)
    checks: dict[str, Callable[[], int]]
    checks = {name: partial(_check_array, store, key, name, array, threads) for name, array in record.arrays.items()}
    for path, ome in record.label_groups.items():
        checks[path] = partial(_check_document, store, [key, *path.split("/")], group_document(ome))
    for where, check in checks.items():
        try:
            nbytes += check()
        except OSError as e:
            damaged = isinstance(e, EntryDamagedError | FileNotFoundError)
            findings.append(Finding(where, _words(e)))
            status = "damaged" if damaged or status == "damaged" else "unreadable"
    in_children, child_bytes = _check_children(store, key, record, threads)
    status_: Status = "damaged" if status == "damaged" else "unreadable" if status == "unreadable" else "ok"
    return Verdict(key, status_, (*findings, *in_children), nbytes + child_bytes, document)


def _check_children(store: Store, key: str, record: EntryRecord, threads: ReadThreads) -> tuple[list[Finding], int]:
    """Check the indexes of voxels of an entry, and look for what does not belong into it."""
    findings: list[Finding] = []
    nbytes = 0
    known = {array_parts(name, is_label=array.is_label) for name, array in record.arrays.items()}
    try:
        names = sorted(_names(store, key, known))
    except OSError:  # gone, or what is in it cannot be told
        return [], 0
    for name in names:
        if not name.startswith(INDEX_PREFIX):
            findings.append(Finding(name, "nothing of this name belongs into an entry"))
            continue
        try:
            document = store.read_document(key, name)
            for array_name, array in parse_entry(document).arrays.items():
                nbytes += _check_array(store, key, array_name, array, threads, name)
            nbytes += len(document)
        except (OSError, ValueError) as e:
            damaged = isinstance(e, EntryDamagedError | FileNotFoundError | ValueError)
            findings.append(Finding(name, _words(e), in_index=damaged))
    return findings, nbytes


def _names(store: Store, key: str, known: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the paths in an entry of what is neither an array of it nor on the way to one, nor their document."""
    above: set[tuple[str, ...]] = {parts[:n] for parts in known for n in range(len(parts))} | {()}
    for parts in sorted(above):
        with contextlib.suppress(*((FileNotFoundError, NotADirectoryError) if parts else ())):  # that was found already
            for name, _ in files.list_directory(store.entry_path(key).joinpath(*parts)):
                inside = (*parts, name)
                if name != DOCUMENT and inside not in known | above:
                    yield "/".join(inside)


def _check_array(store: Store, key: str, name: str, array: ArrayRecord, threads: ReadThreads, child: str = "") -> int:
    """Check an array's shard chunk by chunk, and the document that other Zarr readers go by."""
    fd = store.open_shard(key, name, len(array.grid.shape), child, is_label=array.is_label)
    shard = Shard(fd, array, threads)
    try:
        shard.check()
    finally:
        shard.close()
    parts = [*([key, child] if child else [key]), *array_parts(name, is_label=array.is_label)]
    return array.shard_nbytes + _check_document(store, parts, array_document(array))


def _check_document(store: Store, parts: list[str], expected: bytes) -> int:
    document = files.read_below(store.root, [*parts, DOCUMENT], MAX_DOCUMENT_BYTES)
    if document != expected and not _same_json(document, expected):
        raise EntryDamagedError(f"its {DOCUMENT} is not what the entry says of it: other Zarr tools would misread it")
    return len(document)


def _same_json(a: bytes, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except (ValueError, RecursionError):
        return False


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "a file of it is missing"
    return str(getattr(error, "strerror", None) or error)
