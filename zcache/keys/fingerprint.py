"""The fingerprint of a transform: a description that is the same in every process and on every machine.

Two transforms have the same fingerprint only if they do the same. What this cannot be said of is refused.

- Values are described by type and content; sets and dictionaries without regard to their order. Text and paths that
  name a file count with its size and modification time, where the caller asks for that.
- Functions and classes of the user are described by what they say (`zcache.keys.functions`), with the closures,
  defaults and globals that they use, so that an edit changes the key. They are not described by the module that they
  live in: a class that moves from a notebook to a module keeps its cache.
- What a function imports where it runs counts with the source of the whole module (`zcache.keys.modules`).
- Environment variables count that the user's functions read under a constant name.
- Functions and classes of an installed library are described by module and name; which libraries took part is noted, so
  that their versions can count too.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import os
import random
import re
import sys
import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

import numpy as np

from zcache.errors import FingerprintError
from zcache.keys.callables import CodeWalk
from zcache.keys.files import looks_like_path, may_be_path, source_form
from zcache.keys.objects import (
    attributes,
    is_library_class,
    is_named,
    module_name,
    needs_reduce,
    own_attribute,
)
from zcache.keys.scripted import script_form
from zcache.keys.values import PLAIN, UNDERLYING, Json, array_content, canonical_json, dtype_form, tensor_content

__all__ = ["Canonicaliser", "Fingerprint", "fingerprint", "trace"]

_REDUCED = ("constructor", "arguments", "state", "elements", "entries")
# Lists of a MetaTensor whose records hold `id()` of the transforms that were applied.
_TRACES = frozenset({"_applied_operations", "_pending_operations"})
_RANDOM = (np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A fingerprint, and what it depends on that may change while the program runs.

    Attributes
    ----------
    form : Json
        The description.
    libraries : tuple of str
        The first names of the modules that it tells by name.
    variables : tuple of str
        The environment variables that count in it.
    paths : tuple of str
        The files that are named in it and count.
    remarks : tuple of str
        What could not be followed, and goes unnoticed when it changes.
    """

    form: Json
    libraries: tuple[str, ...]
    variables: tuple[str, ...]
    paths: tuple[str, ...]
    remarks: tuple[str, ...]


def fingerprint(obj: object, *, name: str = "transform") -> Json:
    """Describe a transform, or any value, so that equal descriptions mean equal behaviour.

    An object is described by its class and its attributes (instance dictionary and slots). Random state in an attribute
    called ``R`` (MONAI's `Randomizable`) and what MONAI's transforms note down while they work are left out. An object
    can describe itself: whatever its method ``__zcache_fingerprint__()`` returns then stands for its attributes. The
    user's own classes and functions count with their source, those of installed libraries with module and name alone.

    Parameters
    ----------
    obj : object
        A transform, a function, or a list of them.
    name : str
        What error messages call it.

    Returns
    -------
    Json
        Nested lists of str, int, bool and None.

    Raises
    ------
    FingerprintError
        If something in it has no stable description: an open file, a lock, a generator, a source of random numbers.
        The message names the transform and the attribute, and says what to do.

    Examples
    --------
    >>> fingerprint([1, 1.0, True, "1"])
    ['list', [['int', 1], ['float', '0x1.0000000000000p+0'], ['bool', True], '1']]
    >>> fingerprint({"b": None, "a": (2,)}) == fingerprint({"a": (2,), "b": None})
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    return Canonicaliser(name).form(obj)


def trace(
    obj: object,
    *,
    name: str = "transform",
    root: str | os.PathLike[str] | None = None,
    check_sources: bool = True,
) -> Fingerprint:
    """Take the fingerprint of transforms, files that they name included, and note what it depends on.

    Parameters
    ----------
    obj : object
        As of `fingerprint`.
    name : str
        As of `fingerprint`.
    root : str or os.PathLike, optional
        The folder that paths inside of it are told relative to.
    check_sources : bool
        Whether size and modification time of a file count that is named by an attribute, a default, a global variable,
        or a constant in a function. Folders count by name alone: a transform may well write to one.

    Returns
    -------
    Fingerprint
        The description and its dependencies.

    Raises
    ------
    FingerprintError
        As of `fingerprint`.

    Examples
    --------
    >>> trace([np.mean, {"level": 40}]).libraries
    ('numpy',)
    """
    base = None if root is None else os.path.abspath(root)  # noqa: PTH100 - as for items

    def leaf(value: str | os.PathLike[str]) -> Json | None:
        text = os.fsdecode(value)
        if not (check_sources and (may_be_path(value, text) or looks_like_path(text))):
            return None  # a word such as "image" is no path, whatever lies in the working directory
        return source_form(value, base, folders=False)

    walk = Canonicaliser(name, leaf=leaf)
    form = walk.form(obj)
    return Fingerprint(
        form,
        tuple(sorted(walk.libraries - sys.stdlib_module_names)),
        tuple(sorted(walk.variables)),
        tuple(sorted(walk.paths)),
        tuple(walk.remarks),
    )


class Canonicaliser(CodeWalk):
    """One walk over a value that builds its description.

    Parameters
    ----------
    name : str
        What error messages call the value.
    advice : str, optional
        What they advise to do.
    leaf : callable, optional
        Describes strings and paths, dictionary keys apart, in place of the walk; where it returns None, the walk does.

    Examples
    --------
    >>> Canonicaliser("item", leaf=lambda text: ["leaf", str(text)]).form({"image": "./a.nii"})
    ['dict', [['image', ['leaf', './a.nii']]]]
    """

    def __init__(
        self,
        name: str,
        *,
        advice: str = (
            "Make it a plain parameter (a number, string or array), define __zcache_fingerprint__() on its class, pass"
            " hash_transform=, or mark the transform with zcache.uncached to keep it out of the cached part."
        ),
        leaf: Callable[[str | os.PathLike[str]], Json | None] | None = None,
    ) -> None:
        super().__init__(name, advice=advice, leaf=leaf)
        self._traces = 0

    def form(self, value: object) -> Json:
        """Describe a value.

        Parameters
        ----------
        value : object
            Anything.

        Returns
        -------
        Json
            Its description.

        Raises
        ------
        FingerprintError
            If it has no stable one.

        Examples
        --------
        >>> Canonicaliser("x").form(slice(1, None))
        ['slice', ['int', 1], None, None]
        """
        try:
            return self._visit(value)
        except FingerprintError:
            raise
        except RecursionError as error:
            raise FingerprintError(f"{self._path[0]} is nested too deeply for a cache key. {self._advice}") from error
        except Exception as error:
            # Any special method of the user's, or of a C type, may have raised: whatever it was, there is no key then.
            why = f"{type(error).__name__} ({error})".replace(" ()", "")
            raise self._refuse(value, f"its state cannot be inspected, {why}") from error

    # ---- the walk

    def _visit(self, value: object) -> Json:
        kind = type(value)
        if isinstance(value, str | os.PathLike):
            form = None if isinstance(value, enum.Enum) else self._file(value)
            if form is not None:
                return form
        plain = PLAIN.get(kind)
        if plain is not None:
            return plain(value)
        container = self._CONTAINERS.get(kind)
        if container is not None:
            return self._once(value, lambda: container(self, value))
        if hasattr(type(value), "__zcache_fingerprint__"):
            return self._once(value, lambda: self._described(value))
        method = next((method for kind, method in self._KINDS if isinstance(value, kind)), None)
        return self._other(value) if method is None else method(self, value)

    def _other(self, value: object) -> Json:
        torch = sys.modules.get("torch")  # a value of a torch type exists only where torch is loaded
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return self._tensor(torch, value)
            if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
                return [f"torch.{type(value).__name__}", str(value)]
            if isinstance(value, torch.Generator):
                return self._refuse_random(value)
            if isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
                return script_form(value)
        base = next((base for base in self._BASES if isinstance(value, base)), None)
        if base is not None:
            return self._extended(value, base, lambda: self._content(value, base))
        return self._once(value, lambda: self._object(value))

    def _content(self, value: Any, base: type) -> Json:
        container = self._CONTAINERS.get(base)
        return PLAIN[base](UNDERLYING[base](value)) if container is None else container(self, value)

    def _refuse_random(self, value: object) -> Json:
        raise self._refuse(value, "a source of random numbers, so the result would be frozen in the cache")

    def _refuse_live(self, value: object) -> Json:
        raise self._refuse(value, "a live resource whose state cannot be inspected")

    def _environ(self, _: object) -> Json:
        self._remark("holds the environment variables as a whole: which of them it reads is not known")
        return ["os.environ"]

    # ---- containers

    def _items(self, values: Iterable[object]) -> list[Json]:
        return [self._at(f"[{index}]", value) for index, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], *, ordered: bool = False) -> list[Json]:
        leaf, self._leaf = self._leaf, None  # keys are names, not paths
        keys = [(self._alone(key), key) for key in value]
        self._leaf = leaf
        if not ordered:
            keys.sort(key=lambda pair: canonical_json(pair[0]))
        return [
            [form, self._at(f"[{key!r:.60}]", value[key])]
            for form, key in keys
            if not (self._traces and isinstance(key, str) and key == "id")
        ]

    def _set(self, value: Iterable[object]) -> list[Json]:
        with self._inside("{}"):
            return sorted((self._alone(element) for element in value), key=canonical_json)

    def _extended(self, value: Any, base: type, content: Callable[[], Json]) -> Json:
        """Describe an instance of a subclass of a built-in type, numpy.ndarray or torch.Tensor."""
        kind = ["subclass", self._class(type(value)), base.__name__]
        if isinstance(value, defaultdict):
            kind.append(self._at(".default_factory", value.default_factory))
        return self._once(value, lambda: [*kind, content(), self._state(value)])

    def _array(self, value: Any) -> Json:
        data = np.asarray(value)
        form: list[Json] = ["ndarray", dtype_form(data.dtype), list(data.shape)]
        if data.dtype.names is not None:  # field by field: the padding between them holds anything
            form.append([self._at(f"[{field!r}]", data[field]) for field in data.dtype.names])
        elif data.dtype.hasobject or data.dtype.kind == "T":
            form.append(self._once(data, lambda: self._items(data.ravel().tolist())))
        else:
            form.append(array_content(data))
        if type(value) in (np.ndarray, np.memmap):
            return form
        return self._extended(value, np.ndarray, lambda: form)

    def _masked(self, value: Any) -> Json:
        """Describe a masked array: some of its attributes only appear with use, its mask and fill value among them."""
        mask, fill = np.ma.getmaskarray(value), np.asarray(value.fill_value)
        parts = (np.asarray(value.data), mask, fill, np.asarray(value.hardmask))
        return ["masked", self._class(type(value)), *(self._array(part) for part in parts)]

    def _scalar(self, value: np.generic) -> Json:
        return ["scalar", self._array(np.asarray(value))]

    def _tensor(self, torch: Any, value: Any) -> Json:
        if value.is_meta or value.is_quantized or value.is_nested:
            raise self._refuse(value, "a tensor without plain content")
        form = ["tensor", str(value.dtype), str(value.layout), list(value.shape), tensor_content(torch, value)]
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return form
        return self._extended(value, torch.Tensor, lambda: form)

    # ---- objects

    def _partial(self, value: functools.partial[Any]) -> Json:
        return [
            "partial",
            self._at(".func", value.func),
            self._at(".args", value.args),
            self._at(".keywords", value.keywords),
            self._state(value),
        ]

    def _described(self, value: Any) -> Json:
        cls = type(value)
        own = self._at(".__zcache_fingerprint__()", value.__zcache_fingerprint__())
        return ["described", self._class(cls), own]

    def _object(self, value: Any) -> Json:
        cls = type(value)
        if is_named(value):
            self._told_by_name(value.__module__)
            return ["global", value.__module__, value.__qualname__]
        wrapped = own_attribute(value, "__wrapped__")
        if isinstance(wrapped, types.FunctionType) and is_library_class(cls):  # functools.lru_cache, numba.jit
            return ["wrapper", self._class(cls), self._at(".__wrapped__", wrapped)]
        if callable(value):
            self._owners.append(cls.__qualname__)
        form: Json = [
            "object",
            self._class(cls),
            self._reduced(value) if needs_reduce(cls) else self._state(value),
        ]
        if callable(value):
            self._owners.pop()
        return form

    def _state(self, value: object) -> Json:
        form = []
        for name, part in attributes(value).items():
            self._traces += name in _TRACES
            form.append([name, self._at(f".{name}", part)])
            self._traces -= name in _TRACES
        return form

    def _reduced(self, value: object) -> Json:
        """Describe an object of a C type by what `copy.copy` would make it anew from, as datetime and deque allow."""
        if isinstance(value, Iterator):
            raise self._refuse(value, "an iterator changes with every use")
        parts = value.__reduce_ex__(2)
        if isinstance(parts, str):
            return ["global", module_name(type(value).__module__), parts]
        call, args, state, items, pairs = [*parts[:5], None, None, None][:5]
        content = [call, args, state, list(items or ()), list(pairs or ())]
        return [self._at(f".<{label}>", part) for label, part in zip(_REDUCED, content, strict=True)]

    # ---- which value is described how

    _CONTAINERS: ClassVar[dict[type, Callable[[Canonicaliser, Any], Json]]] = {
        list: lambda self, value: ["list", self._items(value)],
        tuple: lambda self, value: ["tuple", self._items(value)],
        dict: lambda self, value: ["dict", self._mapping(value)],
        types.MappingProxyType: lambda self, value: ["mappingproxy", self._mapping(value)],
        OrderedDict: lambda self, value: ["OrderedDict", self._mapping(value, ordered=True)],
        set: lambda self, value: ["set", self._set(value)],
        frozenset: lambda self, value: ["frozenset", self._set(value)],
        range: lambda self, value: ["range", *(self._visit(part) for part in (value.start, value.stop, value.step))],
        slice: lambda self, value: ["slice", *(self._visit(part) for part in (value.start, value.stop, value.step))],
    }
    # In this order: the first that fits describes the value.
    _KINDS: ClassVar[tuple[tuple[type | tuple[type, ...], Callable[[Canonicaliser, Any], Json]], ...]] = (
        (enum.Enum, lambda self, value: self._enum(value)),
        (np.ma.MaskedArray, _masked),
        (np.ndarray, _array),
        (np.generic, _scalar),
        (np.dtype, lambda _, value: dtype_form(value)),
        (PurePath, lambda _, value: ["path", value.as_posix()]),
        (functools.partial, _partial),
        (type(os.environ), _environ),
        *CodeWalk.code_kinds,
        (types.UnionType, lambda self, value: ["union", self._items(value.__args__)]),
        (re.Pattern, lambda self, value: ["pattern", self._visit(value.pattern), value.flags]),
        (logging.Logger, lambda _, value: ["logger", value.name]),
        (_RANDOM, _refuse_random),
        ((io.IOBase, threading.local, types.GeneratorType), _refuse_live),
    )
    _BASES = (*UNDERLYING, OrderedDict, dict, list, tuple, set, frozenset)
