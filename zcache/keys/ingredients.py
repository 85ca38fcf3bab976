"""What a key is made of, kept with the entry, and how two keys of one source differ."""

from __future__ import annotations

import base64
import difflib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zcache.keys.functions import place
from zcache.keys.values import Json, canonical_json, digest

__all__ = [
    "KEY_SCHEME",
    "Difference",
    "Nearest",
    "differences",
    "entry_key",
    "ingredients",
    "nearest",
    "pack",
    "unpack",
]

KEY_SCHEME = 2
"""Version of how keys are made. The version of the format on disk has no part in it."""

_MOST_PACKED_BYTES = 1 << 14  # of text in an entry's document
_MOST_UNPACKED_BYTES = 1 << 22
_SHOWN = 120
# Forms that are shown whole: to take them apart would say less.
_WHOLE = frozenset({"bool", "class", "file", "float", "folder", "function", "int", "ndarray", "object", "tensor"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two keys differ.

    Attributes
    ----------
    what : str
        Where it is: ``"ScaleIntensityRanged.scaler.a_min"``, ``"switch monai.track_meta"``, ``"file image"``.
    before, after : str
        What was there and what is there now, shortened; ``"–"`` for nothing.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Nearest:
    """An entry, when it was made, and in what its key differs from another."""

    key: str
    created: str
    differences: tuple[Difference, ...]


def ingredients(
    *, item: Json, pipeline: Json, precision: str, switches: Mapping[str, Json], versions: Mapping[str, str]
) -> dict[str, Json]:
    """Put together what makes a key.

    Parameters
    ----------
    item : Json
        From `item_fingerprint`, or what the user's ``hash_func`` gave.
    pipeline : Json
        From `trace`, or its `digest`: the key is the same.
    precision : str
        The precision policy.
    switches : mapping of str to Json
        From `switches`.
    versions : mapping of str to str
        Versions of libraries by name, where they count; empty otherwise.

    Returns
    -------
    dict of str to Json
        For `entry_key`.
    """
    return {
        "scheme": KEY_SCHEME,
        "item": item,
        "pipeline": pipeline,
        "precision": precision,
        "switches": dict(switches),
        "versions": dict(versions),
    }


def entry_key(parts: Mapping[str, Json]) -> str:
    """Make the key of a cache entry.

    Parameters
    ----------
    parts : mapping of str to Json
        From `ingredients`.

    Returns
    -------
    str
        32 hexadecimal digits: 128-bit BLAKE2b of their canonical JSON, with the digest of the pipeline in its place.

    Examples
    --------
    >>> plain = {"precision": "lossless", "switches": {}, "versions": {}}
    >>> key = entry_key(ingredients(item="a.nii.gz", pipeline=["list", []], **plain))
    >>> key == entry_key(ingredients(item="a.nii.gz", pipeline=digest(["list", []]), **plain)), len(key)
    (True, 32)
    """
    pipeline = parts["pipeline"]
    return digest({**parts, "pipeline": pipeline if isinstance(pipeline, str) else digest(pipeline)})


def pack(value: Json) -> str | None:
    """Write a description as short text for an entry's document; None if it is too long for that.

    Examples
    --------
    >>> unpack(pack(["list", ["a"] * 1000])) == ["list", ["a"] * 1000], len(pack(["list", ["a"] * 1000])) < 100
    (True, True)
    """
    packed = base64.b85encode(zlib.compress(canonical_json(value).encode("ascii"), 9)).decode("ascii")
    return packed if len(packed) <= _MOST_PACKED_BYTES else None


def unpack(text: object) -> Json:
    """Read what `pack` wrote; None if it is anything else, or too much."""
    if not isinstance(text, str) or len(text) > _MOST_PACKED_BYTES:
        return None
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(base64.b85decode(text), _MOST_UNPACKED_BYTES)
        value: Json = json.loads(data) if inflated.eof else None
    except (ValueError, zlib.error, RecursionError):
        return None
    return value


def differences(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[Difference]:
    """Find out in what the ingredients of two keys differ.

    Parameters
    ----------
    before, after : mapping of str to Json
        From `ingredients`, with whole pipelines.

    Returns
    -------
    list of Difference
        The pipeline first, a step at a time; empty if nothing differs.

    Examples
    --------
    >>> import functools
    >>> from zcache.keys import fingerprint
    >>> plain = {"precision": "lossless", "switches": {}, "versions": {}, "item": "a.nii.gz"}
    >>> one, two = (ingredients(pipeline=fingerprint([slice(0, n)]), **plain) for n in (1, 2))
    >>> print(*differences(one, two))
    pipeline[0].stop: 1 -> 2
    """
    names = {"pipeline": "pipeline", "item": "item", "precision": "precision", "scheme": "version of the key scheme"}
    found = [d for name, label in names.items() for d in _compare(label, before.get(name), after.get(name))]
    for kind, label in (("switches", "switch"), ("versions", "version of")):
        one, two = before.get(kind) or {}, after.get(kind) or {}
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += _keyed(f"{label} ", one, two)
    return found


def nearest(
    parts: Mapping[str, Json], source: Iterable[str], entries: Iterable[tuple[str, Mapping[str, Json]]]
) -> Nearest | None:
    """Find the entry of the same source whose key is made of what comes nearest.

    Parameters
    ----------
    parts : mapping of str to Json
        What the key in question is made of.
    source : iterable of str
        The files of the item.
    entries : iterable of (str, mapping)
        Keys, and what the entries say of themselves.

    Returns
    -------
    Nearest or None
        The one that differs in the least, the newest of several; None if none is of any of the files, by path, else by
        name.
    """
    paths = set(source)
    names = {_file_name(path) for path in paths}
    best: tuple[tuple[bool, int, str], Nearest] | None = None
    for key, about in entries:
        own = about.get("source")
        files = {str(path) for path in own} if isinstance(own, list) else set()
        same = not paths.isdisjoint(files) or paths == files
        unpacked = unpack(about.get("ingredients"))
        if not isinstance(unpacked, Mapping) or not (same or names & {_file_name(path) for path in files}):
            continue
        found = Nearest(key, str(about.get("created", "")), tuple(differences(unpacked, parts)))
        rank = (same, -len(found.differences), found.created)
        if best is None or rank > best[0]:
            best = (rank, found)
    return None if best is None else best[1]


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _compare(where: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    kind = _kind(before)
    if kind != _kind(after) or kind is None:
        yield Difference(where, _text(before), _text(after))
    elif kind == "keyed":
        yield from _keyed(f"{where} ", before, after)
    elif kind == "def":  # numbered as they are met: the numbers say nothing
        yield from _compare(where, before[2], after[2])
    elif kind == "dict" or (kind == "object" and before[1] == after[1]):
        yield from _named(where, before[-1], after[-1])
    elif kind in {"list", "tuple"}:
        yield from _sequence(where, before[1], after[1])
    elif kind == "slice":
        pairs = ([*zip(("start", "stop", "step"), form[1:], strict=True)] for form in (before, after))
        yield from _named(where, *pairs)
    elif kind in _WHOLE or len(before) != len(after):
        yield Difference(where, _text(before), _text(after))
    else:
        yield from (found for one, two in zip(before, after, strict=True) for found in _compare(where, one, two))


def _kind(form: Any) -> str | None:
    if isinstance(form, Mapping):
        return "keyed"
    return form[0] if isinstance(form, list) and form and isinstance(form[0], str) else None


def _keyed(where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    missing = object()
    for name in sorted({*before, *after}):
        one, two = before.get(name, missing), after.get(name, missing)
        if one is missing or two is missing:
            texts = ("–" if part is missing else _text(part) for part in (one, two))
            yield Difference(f"{where}{name}", *texts)
        else:
            yield from _compare(f"{where}{name}", one, two)


def _named(where: str, before: Any, after: Any) -> Iterator[Difference]:
    """Compare the attributes of two objects, or the values of two dictionaries."""
    one, two = ({_name(pair[0]): pair[1] for pair in pairs} for pairs in (before, after))
    yield from _keyed(f"{where}.", one, two)


def _name(form: Any) -> str:
    return form if isinstance(form, str) else _text(form)


def _sequence(where: str, before: list[Any], after: list[Any]) -> Iterator[Difference]:
    """Compare two lists, of which elements may have been put in or left out."""
    one, two = ([_alike(form) for form in forms] for forms in (before, after))
    for _, i, end_i, j, end_j in difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        for step in range(max(end_i - i, end_j - j)):
            old = before[i + step] if i + step < end_i else None
            new = after[j + step] if j + step < end_j else None
            if i + step < end_i and j + step < end_j:
                label = _class_name(new) if _class_name(new) == _class_name(old) else ""
                yield from _compare(label or f"{where}[{j + step}]", old, new)
            else:
                texts = ("–" if part is None else _text(part) for part in (old, new))
                yield Difference(f"{where}[{(j if old is None else i) + step}]", *texts)


def _alike(form: Any) -> str:
    """Tell elements apart by their class alone, where they have one, so that those of one class are compared."""
    return _class_name(form) or canonical_json(form)


def _class_name(form: Any) -> str:
    if _kind(form) == "object":
        cls = form[1]
        name = cls[2] if cls[0] == "class" else cls[2].get("class", "") if cls[0] == "def" else ""
        return str(name)
    return ""


def _text(form: Any) -> str:
    """Write a form for people."""
    if isinstance(form, str) and place(form):
        return f"{form} ({place(form)})"
    text = _told(form)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _told(form: Any) -> str:
    match form:
        case str():
            text = form
        case ["float", digits]:
            text = repr(float.fromhex(digits))
        case ["int" | "bool", number]:
            text = str(number)
        case ["rooted", _, inside] | ["path", inside]:
            text = str(inside)
        case ["file", told, size, mtime_ns, *_]:
            text = f"{_told(told)} of {size} bytes, modified {mtime_ns / 1e9:.6f}"
        case ["folder", told, entries, *_]:
            text = f"{_told(told)} with {entries} entries"
        case ["ndarray" | "tensor" as kind, *_]:
            text = f"{kind} {digest(form)[:8]}"
        case ["class" | "function" as kind, module, name]:
            text = f"{kind} {module}.{name}"
        case _:
            text = _class_name(form) or canonical_json(form)
    return text
