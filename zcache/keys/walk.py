"""One walk over a value that builds its description: where it is, what is open, what was described already."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zcache.errors import FingerprintError
from zcache.keys.modules import is_library
from zcache.keys.values import Json

__all__ = ["Walk"]


class Walk(ABC):
    """What all steps of a walk share.

    Parameters
    ----------
    name : str
        What error messages call the value.
    advice : str
        What they advise to do.
    leaf : callable, optional
        Describes strings and paths, dictionary keys apart, in place of the walk; where it returns None, the walk does.

    Attributes
    ----------
    libraries : set of str
        The first names of the modules that were told by name.
    variables : set of str
        The environment variables that count.
    paths : set of str
        The files that were found named in it.
    remarks : list of str
        What could not be followed, and goes unnoticed when it changes.
    """

    def __init__(
        self, name: str, *, advice: str, leaf: Callable[[str | os.PathLike[str]], Json | None] | None = None
    ) -> None:
        self.libraries: set[str] = set()
        self.variables: set[str] = set()
        self.paths: set[str] = set()
        self.remarks: list[str] = []
        self._advice = advice
        self._leaf = leaf
        self._path = [name]
        self._owners: list[str] = []
        self._open: dict[int, int] = {}  # what is being described right now, and how deep: a cycle refers back to it
        # Functions and classes are described once and then referred to by number: helpers that call each other in
        # several ways would otherwise be described exponentially often. The value is kept alive: its id must stay its.
        self._defined: dict[int, tuple[int, object]] = {}

    @abstractmethod
    def _visit(self, value: object) -> Json:
        """Describe a value."""

    def _file(self, value: str | os.PathLike[str]) -> Json | None:
        """Describe the file that a string or path names, None if it names none or files do not count."""
        form = None if self._leaf is None else self._leaf(value)
        if form is not None:
            self.paths.add(os.fsdecode(value))
        return form

    def _told_by_name(self, module: str | None) -> bool:
        """Tell whether a module is a library's, and note which."""
        found = is_library(module)
        if found and module is not None:
            self.libraries.add(module.partition(".")[0])
        return found

    def _remark(self, what: str) -> None:
        remark = f"{self._owner()}: {what} ({''.join(self._path)})"
        if remark not in self.remarks:
            self.remarks.append(remark)

    def _owner(self) -> str:
        return self._owners[-1] if self._owners else self._path[0]

    def _at(self, label: str, value: object) -> Json:
        """Describe a part, so that an error inside says where it is."""
        self._path.append(label)
        form = self._visit(value)
        self._path.pop()  # not in a `finally`: an error on its way out reports the path, and the walk is over
        return form

    @contextmanager
    def _inside(self, label: str) -> Iterator[None]:
        self._path.append(label)
        yield
        self._path.pop()  # as above

    def _once(self, value: object, build: Callable[[], Json]) -> Json:
        """Describe a container or an object, or refer back to it where it contains itself."""
        key = id(value)
        if key in self._open:
            return ["cycle", self._open[key]]
        self._open[key] = len(self._open)
        form = build()
        del self._open[key]
        return form

    def _define(self, value: object, build: Callable[[], Json]) -> Json:
        if id(value) in self._defined:
            return ["ref", self._defined[id(value)][0]]
        number = len(self._defined)
        self._defined[id(value)] = (number, value)
        return ["def", number, build()]

    def _alone(self, value: object) -> Json:
        """Describe an element of a set or a key so that the numbering does not depend on the order of the set."""
        saved = dict(self._defined)
        form = self._visit(value)
        self._defined = saved
        return form

    def _refuse(self, value: object, why: str) -> FingerprintError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return FingerprintError(
            f"{self._owner()}: no cache key for {''.join(self._path)} ({kind}): {why}. {self._advice}"
        )
