"""One cache under attack: an entry with every kind of array, mutated again and again, and each reading judged."""

from __future__ import annotations

import enum
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile import mutations as m
from tests.hostile.forge import HEAD, Forged, sealed, sealed_text
from zcache.cache import Cache
from zcache.encoding.payload import encode_item
from zcache.encoding.shard import ShardIndex
from zcache.errors import ZCacheWarning
from zcache.training.leaves import torch_leaf_codecs

KEY = f"{1:032x}"
_MISS = object()


class Outcome(enum.Enum):
    """What came of reading a mutated entry.

    ``RIGHT``: the item to the last bit. ``MISS``: a counted miss. ``OTHER``: another item, which only a forger may
    achieve.
    """

    RIGHT = "right bits"
    MISS = "counted miss"
    OTHER = "another item"


class WrongReadError(AssertionError):
    """Damage that was read as if it were sound, or a miss that no counter knows of."""


def sample() -> dict[str, Any]:
    """A small item whose arrays are stored in every form, with chunks that are left out and scalars of many types."""
    rng = np.random.default_rng(7)
    label = np.zeros((1, 17, 18, 19), np.uint8)  # over an image
    label[0, 3:9, 2:9, 4:11] = rng.integers(1, 3, (6, 7, 7))
    return {
        "noise": rng.standard_normal((1, 9, 14, 16)).astype("f4"),
        "whole": rng.integers(-900, 900, (1, 9, 14, 16)).astype("f4"),
        "few": rng.integers(0, 9, (1, 17, 18, 19)).astype("f4") / 7,
        "many": rng.integers(0, 700, (1, 17, 18, 19)).astype("f8") / 7,
        "label": label,
        "mask": rng.integers(0, 2, (1, 17, 18, 19)).astype(bool),
        "affine": np.diag([-1.5, -1.5, 3.0, 1.0]),
        "id": ("ct-0007", 63, 2**80, float("nan"), b"\x00\xff", {1, 2}, np.float32(-0.0), slice(1, None)),
        "spacing": {3: 0.5, "unit": None},
    }


class Trial:
    """A cache with one entry.

    Parameters
    ----------
    folder : path
        For the cache.
    """

    def __init__(self, folder: Path) -> None:
        self.item = sample()
        self._codecs = torch_leaf_codecs()
        self._expected = _bits(self.item, self._codecs)
        self.cache = Cache(folder, chunks=(8, 8, 8), leaf_codecs=self._codecs)
        self.entry = folder / "cache.zarr" / KEY
        self.heal()
        self.root_document = folder / "cache.zarr" / "zarr.json"
        self.adopt()
        if self.read() is not Outcome.RIGHT:
            raise WrongReadError("the entry is not what was put before anything was changed")

    def adopt(self) -> None:
        """Take the entry as it lies there for the one to attack: after it was replaced, its files are others."""
        paths = [p for p in sorted(self.entry.rglob("*")) if p.is_file()]
        self.originals = {str(p.relative_to(self.entry)): p.read_bytes() for p in paths}
        self.forged = Forged.of(self.entry)
        self._dirty: set[str] = set()

    def write(self, files: dict[str, bytes]) -> None:
        """Put these files in the place of the entry's own, and the others back as they were."""
        changed = {name: data for name, data in files.items() if data != self.originals[name]}
        for name in self._dirty | set(changed):
            (self.entry / name).write_bytes(changed.get(name, self.originals[name]))
        self._dirty = set(changed)

    def read(self) -> Outcome:
        """Read the entry as a process that comes to it anew, and judge what it got."""
        before = self.cache.stats
        self.cache.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ZCacheWarning)
            found = self.cache.get(KEY, _MISS)
        after = self.cache.stats
        misses = after.misses - before.misses
        counted = after.damaged - before.damaged + after.read_errors - before.read_errors
        if found is _MISS:
            if (misses, counted) != (1, 1):
                raise WrongReadError(f"{misses} misses and {counted} damaged or unreadable entries were counted")
            return Outcome.MISS
        if misses or counted:
            raise WrongReadError("a hit was counted as damage")
        return Outcome.RIGHT if _bits(found, self._codecs) == self._expected else Outcome.OTHER

    def heal(self) -> None:
        """Put the item again, as a data set does after a miss, and write what is pending."""
        self.cache.put(KEY, self.item)
        self.cache.close()

    def assert_healed(self) -> None:
        """After a miss: the next put replaces the entry, and it is right to the last bit."""
        stored = self.cache.stats.stored
        self.heal()
        if self.cache.stats.stored != stored + 1 or self.read() is not Outcome.RIGHT:
            raise WrongReadError("the entry was not replaced by the put that followed a miss")


def _bits(item: Any, codecs: Any) -> tuple[str, list[tuple[str, str, tuple[int, ...], bytes]]]:
    """Everything that an item is made of: its types and every bit."""
    try:
        encoded = encode_item(item, codecs)
    except (TypeError, ValueError, RecursionError) as e:  # what a forger made up need not be an item that can be stored
        return repr(e), []
    leaves = [(leaf.name, leaf.array.dtype.str, leaf.array.shape, leaf.array.tobytes()) for leaf in encoded.leaves]
    return json.dumps(encoded.tree), leaves


# --- Attacks: what is written in the place of the entry's files -------------------------------------------------------

Attack = Callable[[Trial, m.Dice], dict[str, bytes]]


def rot(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """Any file after an accident; the checksums stay what they were.

    Seldom one of the arrays' own documents, which are for other readers of Zarr.
    """
    for_others = dice.below(8) == 0
    names = [n for n in sorted(trial.originals) if n.endswith("/zarr.json") == for_others]
    name = m.one_of(dice, names)
    return {name: m.damaged(trial.originals[name], dice)}


def forged_document(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """Places of the document changed, its checksum right."""
    return {"zarr.json": sealed(m.changed_document(trial.forged.document, dice))}


def forged_text(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """The document's text damaged, its checksum right."""
    return {"zarr.json": sealed_text(m.changed_text(trial.originals["zarr.json"], len(HEAD) + 8, dice))}


def forged_payload(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """Another payload tree."""
    document = _copy(trial.forged).document
    document["attributes"]["zcache"]["payload"] = m.made_up_tree(dice)
    return {"zarr.json": sealed(document)}


def forged_chunk(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """One chunk's stream changed, all checksums right, most often with the sizes that are expected."""
    forged = _copy(trial.forged)
    streams = forged.shards[m.one_of(dice, sorted(forged.shards))].streams
    stored = [i for i, s in enumerate(streams) if s]
    i = m.one_of(dice, stored)
    streams[i] = m.changed_stream(streams[i], dice, plausible=dice.below(4) > 0)
    return forged.files()


def forged_index(trial: Trial, dice: m.Dice) -> dict[str, bytes]:
    """Places of chunks changed, all checksums right."""
    forged = _copy(trial.forged)
    shard = forged.shards[m.one_of(dice, sorted(forged.shards))]
    size = sum(len(s) + 4 for s in shard.streams if s) + ShardIndex.nbytes(len(shard.streams)) + 4
    shard.table = m.changed_places(shard.true_table(), size, dice)
    return forged.files()


def _copy(forged: Forged) -> Forged:
    shards = {name: type(s)(list(s.streams)) for name, s in forged.shards.items()}
    return Forged(json.loads(json.dumps(forged.document)), shards)


DAMAGE: tuple[Attack, ...] = (rot,)
FORGERIES: tuple[Attack, ...] = (forged_document, forged_text, forged_payload, forged_chunk, forged_index)


def attempt(trial: Trial, attack: Attack, dice: m.Dice) -> Outcome:
    """Carry one attack out and judge it; damage must never be read as another item.

    Raises
    ------
    WrongReadError
        It was.
    """
    trial.write(attack(trial, dice))
    outcome = trial.read()
    if attack in DAMAGE and outcome is Outcome.OTHER:
        raise WrongReadError(f"{attack.__name__} was read as another item")
    return outcome
