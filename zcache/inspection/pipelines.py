"""The pipelines that filled a cache, for people: steps with their parameters, and what tells two of them apart."""

from __future__ import annotations

import difflib
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from zcache.encoding.payload import Json

__all__ = ["Pipeline", "Pipelines", "Step", "difference", "readable"]

_MANY = 8  # pipelines that one cache rarely exceeds
_ARRAY = re.compile(r"(?:ndarray|Tensor|MetaTensor) \S+ \([0-9, ]*\) (?P<values>.+)")
_DTYPE = re.compile(r"(?:numpy|torch)\.(?P<name>[a-z]+[0-9]*)")
_ENUM = re.compile(r"[A-Z][A-Za-z]*\.(?P<name>[A-Z][A-Z_0-9]*)")
_NOISE = frozenset({"meta_key_postfix", "allow_missing_keys"})  # of MONAI's transforms, hardly ever changed


@dataclass(frozen=True, slots=True)
class Step:
    """One transform of a pipeline.

    Attributes
    ----------
    name, module : str
        Its class, or the function.
    parameters : dict
        As they were described when the entry was written.
    source : str
        Source of a function without a name of its own.

    Examples
    --------
    >>> known = {"keys": ["image"], "pixdim": "ndarray float64 (2,) [1.0, 2.0]", "lazy": False}
    >>> str(Step("Spacingd", parameters=known))
    "Spacingd(keys=['image'], pixdim=[1.0, 2.0])"
    """

    name: str
    module: str = ""
    parameters: dict[str, Json] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def of(cls, described: Json) -> Step:
        """Read the description of a step, whoever wrote it."""
        if not isinstance(described, dict) or "transform" not in described:
            return cls(str(described))
        parameters = described.get("parameters")
        return cls(
            str(described["transform"]),
            str(described.get("module", "")),
            {str(k): v for k, v in parameters.items()} if isinstance(parameters, dict) else {},
            str(described.get("source", "")),
        )

    def __str__(self) -> str:
        if self.source:
            return self.source
        shown = {k: v for k, v in self.parameters.items() if k not in _NOISE and not _says_nothing(v)}
        return f"{self.name}({', '.join(f'{k}={readable(v)}' for k, v in shown.items())})"

    def to_json(self) -> Json:
        """Return all that is known of it."""
        own = {"transform": self.name, "module": self.module, "parameters": self.parameters}
        return {**own, "source": self.source} if self.source else own


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The cached transforms, in order. Two entries made by the same have the very same object."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return " → ".join(step.name for step in self.steps) or "no transforms"

    def to_json(self) -> Json:
        """Return all that is known of it."""
        return [step.to_json() for step in self.steps]


class Pipelines:
    """The pipelines of one cache: each distinct description is read once and shared by its entries. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_text: OrderedDict[str, Pipeline] = OrderedDict()

    def known_at(self, text: str, start: int) -> tuple[Pipeline, int] | None:
        """Return the pipeline whose description begins there, with its end, if it is among the last that were seen.

        No JSON list is the beginning of another one, so comparing text is enough.
        """
        with self._lock:
            for known in list(reversed(self._by_text))[:_MANY]:
                if text.startswith(known, start):
                    self._by_text.move_to_end(known)
                    return self._by_text[known], start + len(known)
        return None

    def add(self, text: str, described: Json) -> Pipeline:
        """Return the pipeline of a description that was read."""
        steps = described if isinstance(described, list) else [described]
        with self._lock:
            found = self._by_text.get(text)
            if found is None:
                found = self._by_text[text] = Pipeline(tuple(Step.of(step) for step in steps))
        return found


def difference(a: Pipeline, b: Pipeline) -> list[str]:
    """Say what makes `b` another pipeline than `a`, a line for each step or parameter.

    Examples
    --------
    >>> a = Pipeline((Step("Load"), Step("Spacing", parameters={"pixdim": [1, 1]})))
    >>> b = Pipeline((Step("Load"), Step("Spacing", parameters={"pixdim": [2, 2]}), Step("Flip")))
    >>> difference(a, b)
    ['~ Spacing: pixdim=[1, 1] → [2, 2]', '+ Flip()']
    """
    lines: list[str] = []
    names = [step.name for step in a.steps], [step.name for step in b.steps]
    for kind, i, j, k, m in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if kind == "equal":
            for old, new in zip(a.steps[i:j], b.steps[k:m], strict=True):
                changed = _changed(old, new)
                if changed:
                    lines.append(f"~ {old.name}: {', '.join(changed)}")
        else:
            lines += [f"− {step}" for step in a.steps[i:j]] + [f"+ {step}" for step in b.steps[k:m]]
    return lines


def _changed(old: Step, new: Step) -> list[str]:
    names = dict.fromkeys([*old.parameters, *new.parameters])
    missing = object()
    changed = []
    for name in names:
        a, b = old.parameters.get(name, missing), new.parameters.get(name, missing)
        if a is missing:
            changed.append(f"{name}={readable(b)} is new")
        elif b is missing:
            changed.append(f"{name}={readable(a)} is gone")
        elif a != b:
            changed.append(f"{name}={readable(a)} → {readable(b)}")
    if old.source != new.source:
        changed.append(f"source {old.source} → {new.source}")
    if old.module != new.module:
        changed.append(f"module {old.module} → {new.module}")
    return changed


def readable(value: Json) -> str:
    """Return a parameter as one would write it in a script.

    Examples
    --------
    >>> readable(["ndarray float64 (2,) [1.0, 2.0]", "GridSamplePadMode.BORDER", "numpy.float32", "bilinear"])
    "[[1.0, 2.0], 'border', float32, 'bilinear']"
    """
    if isinstance(value, str):
        return _readable_text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(readable, value))}]"
    if isinstance(value, dict) and "transform" in value:
        return str(Step.of(value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {readable(v)}' for k, v in value.items())}}}"
    return repr(value)


def _readable_text(text: str) -> str:
    array, dtype, enum = _ARRAY.fullmatch(text), _DTYPE.fullmatch(text), _ENUM.fullmatch(text)
    if array or dtype:
        return array["values"] if array else dtype["name"] if dtype else text
    return repr(enum["name"].lower() if enum else text)


def _says_nothing(value: Any) -> bool:
    """Whether a parameter is left at what usually means "do nothing"."""
    if isinstance(value, list):
        return bool(value) and all(_says_nothing(part) for part in value)
    return value is None or value is False or (isinstance(value, str) and value.endswith("[nan]"))
