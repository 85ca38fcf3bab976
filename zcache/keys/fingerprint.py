"""The fingerprint of a transform: a description that is the same in every process and on every machine.

Two transforms have the same fingerprint only if they do the same. What this cannot be said of is refused.

- Values are described by type and content; sets and dictionaries without regard to their order.
- Functions and classes of the user are described by what they say (`zcache.keys.functions`), with the closures,
  defaults and globals that they use, so that an edit changes the key. They are not described by the module that they
  live in: a class that moves from a notebook to a module keeps its cache.
- Functions and classes of an installed library are described by module and name alone. An upgrade of MONAI that changes
  what a transform computes therefore does not change the key: use another ``cache_dir`` then.
- Modules are described by name; of a user's module, what a function reads from it (``helpers.scale``) as well.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from zcache.errors import FingerprintError
from zcache.keys.functions import code_digest, global_chains
from zcache.keys.objects import (
    attributes,
    is_generated,
    is_library,
    is_library_class,
    is_named,
    module_name,
    needs_reduce,
    own_attribute,
)
from zcache.keys.values import PLAIN, UNDERLYING, Json, array_content, canonical_json, dtype_form, tensor_content

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Canonicaliser", "fingerprint"]

_REDUCED = ("constructor", "arguments", "state", "elements", "entries")
# Lists of a MetaTensor whose records hold `id()` of the transforms that were applied.
_TRACES = frozenset({"_applied_operations", "_pending_operations"})

_MEMBERS_SKIPPED = frozenset({"_abc_impl", "__annotate__", "__annotate_func__", "__classcell__"})
_C_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_RANDOM = (np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)


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


class Canonicaliser:
    """One walk over a value that builds its description.

    Parameters
    ----------
    name : str
        What error messages call the value.
    advice : str, optional
        What they advise to do.
    leaf : callable, optional
        Describes strings and paths, dictionary keys apart, in place of the walk.

    Examples
    --------
    >>> Canonicaliser("item", leaf=lambda text: ["leaf", str(text)]).form({"image": "a.nii"})
    ['dict', [['image', ['leaf', 'a.nii']]]]
    """

    def __init__(
        self,
        name: str,
        *,
        advice: str = (
            "Make it a plain parameter (a number, string or array), define __zcache_fingerprint__() on its class, pass"
            " hash_transform=, or mark the transform with zcache.uncached to keep it out of the cached part."
        ),
        leaf: Callable[[str | os.PathLike[Any]], Json] | None = None,
    ) -> None:
        self._advice = advice
        self._leaf = leaf
        self._path = [name]
        self._owners: list[str] = []
        self._open: dict[int, int] = {}  # what is being described right now, and how deep: a cycle refers back to it
        # Functions and classes are described once and then referred to by number: helpers that call each other in
        # several ways would otherwise be described exponentially often. The value is kept alive: its id must stay its.
        self._defined: dict[int, tuple[int, object]] = {}
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
        except RecursionError as error:
            raise FingerprintError(f"{self._path[0]} is nested too deeply for a cache key. {self._advice}") from error

    # ---- the walk

    def _visit(self, value: object) -> Json:
        if self._leaf is not None and isinstance(value, str | os.PathLike) and not isinstance(value, enum.Enum):
            return self._leaf(value)
        plain = PLAIN.get(type(value))
        if plain is not None:
            return plain(value)
        container = self._CONTAINERS.get(type(value))
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
        base = next((base for base in self._BASES if isinstance(value, base)), None)
        if base is not None:
            return self._extended(value, base, lambda: self._content(value, base))
        return self._once(value, lambda: self._object(value))

    def _content(self, value: Any, base: type) -> Json:
        container = self._CONTAINERS.get(base)
        return PLAIN[base](UNDERLYING[base](value)) if container is None else container(self, value)

    def _at(self, label: str, value: object) -> Json:
        """Describe a part, so that an error inside says where it is."""
        with self._inside(label):
            return self._visit(value)

    @contextmanager
    def _inside(self, label: str) -> Iterator[None]:
        self._path.append(label)
        yield
        self._path.pop()  # not in a `finally`: an error on its way out reports the path, and the walk is over

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
        owner = self._owners[-1] if self._owners else self._path[0]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return FingerprintError(f"{owner}: no cache key for {''.join(self._path)} ({kind}): {why}. {self._advice}")

    def _refuse_random(self, value: object) -> Json:
        raise self._refuse(value, "a source of random numbers, so the result would be frozen in the cache")

    def _refuse_live(self, value: object) -> Json:
        raise self._refuse(value, "a live resource whose state cannot be inspected")

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

    # ---- functions, classes, modules

    def _module(self, value: types.ModuleType) -> Json:
        return ["module", module_name(value.__name__)]

    def _function(self, function: Any) -> Json:
        code = function.__code__
        if is_named(function) and code.co_name != "<lambda>":
            return ["function", function.__module__, function.__qualname__]
        return self._define(function, lambda: self._function_form(function))

    def _function_form(self, function: Any) -> Json:
        code, module = function.__code__, function.__globals__.get("__name__")
        library = is_library(module)
        # The inner function of a library's decorator is told by its name, and what it wraps is in its closure.
        by_name = library and code.co_name != "<lambda>"
        form: dict[str, Json] = {"code": [module, code.co_qualname] if by_name else code_digest(function)}
        with self._inside(f".<{function.__name__}>"):
            for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                form[f"closure {variable}"] = self._cell(variable, cell)
            if function.__defaults__:
                form["defaults"] = self._at(".<defaults>", function.__defaults__)
            if function.__kwdefaults__:
                form["kwdefaults"] = self._at(".<defaults>", function.__kwdefaults__)
            if not library:
                for chain in global_chains(code):
                    form.update(self._global(function.__globals__, chain))
                attributes = {key: value for key, value in vars(function).items() if not key.startswith("__")}
                if attributes:
                    form["attributes"] = self._at(".<attributes>", attributes)
        return form

    def _cell(self, variable: str, cell: types.CellType) -> Json:
        try:
            content = cell.cell_contents
        except ValueError:  # the enclosing function has not set it yet
            return ["empty"]
        return self._at(f".<closure {variable}>", content)

    def _global(self, namespace: dict[str, Any], chain: tuple[str, ...]) -> dict[str, Json]:
        """Describe what a function finds under a global name; built-in and unset names say nothing more."""
        if chain[0] not in namespace:
            return {}
        value, used = namespace[chain[0]], [chain[0]]
        for attribute in chain[1:]:
            if not isinstance(value, types.ModuleType) or is_library(value.__name__) or attribute not in vars(value):
                break
            value = vars(value)[attribute]
            used.append(attribute)
        dotted = ".".join(used)
        return {f"global {dotted}": self._at(f".<global {dotted}>", value)}

    def _builtin(self, value: Any) -> Json:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return ["builtin", value.__module__ or "builtins", value.__qualname__]
        return ["builtin method", value.__name__, self._at(".__self__", owner)]

    def _descriptor(self, value: Any) -> Json:
        return ["builtin descriptor", self._visit(value.__objclass__), value.__name__]

    def _method(self, value: types.MethodType) -> Json:
        return ["method", self._visit(value.__func__), self._at(".__self__", value.__self__)]

    def _partial(self, value: functools.partial[Any]) -> Json:
        return [
            "partial",
            self._at(".func", value.func),
            self._at(".args", value.args),
            self._at(".keywords", value.keywords),
            self._state(value),
        ]

    def _enum(self, value: enum.Enum) -> Json:
        form: list[Json] = ["enum", module_name(type(value).__module__), type(value).__qualname__, value._name_]
        if is_library(type(value).__module__):
            return form
        return [*form[:1], *form[2:], self._at(".value", value._value_)]  # a user's class: by content, not by module

    def _class(self, cls: type) -> Json:
        if is_library_class(cls):
            return ["class", cls.__module__, cls.__qualname__]
        return self._define(cls, lambda: self._class_form(cls))

    def _class_form(self, cls: type) -> Json:
        with self._inside(f".<class {cls.__name__}>"):
            if issubclass(cls, enum.Enum):
                members: Json = [
                    [name, self._at(f".{name}", member._value_)] for name, member in cls.__members__.items()
                ]
                return {"enum": cls.__qualname__, "members": members}
            form: dict[str, Json] = {"class": cls.__qualname__, "bases": [self._class(base) for base in cls.__bases__]}
            if type(cls) is not type:
                form["metaclass"] = self._class(type(cls))
            if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # collections.namedtuple: the rest is generated
                form["fields"] = list(cls._fields)
            for name, member in sorted(vars(cls).items()):
                if name in _MEMBERS_SKIPPED or (name == "R" and isinstance(member, np.random.RandomState)):
                    continue
                if not is_generated(cls, name, member):
                    form.update(self._member(name, member))
        return form

    def _member(self, name: str, member: object) -> dict[str, Json]:
        parts: dict[str, object] = {name: member}
        if isinstance(member, property):
            parts = {f"{name} {part}": getattr(member, part) for part in ("fget", "fset", "fdel")}
        elif isinstance(member, functools.cached_property):
            parts = {f"{name} cached": member.func}
        elif isinstance(member, staticmethod | classmethod):
            parts = {f"{name} {type(member).__name__}": member.__func__}
        elif isinstance(member, _C_DESCRIPTORS) or type(member).__name__ == "_tuplegetter":
            return {}
        elif name.startswith("__") and name.endswith("__") and not isinstance(member, types.FunctionType):
            return {}  # what Python notes down: __doc__, __module__, __annotations__, __slots__
        return {f"member {label}": self._at(f".{label}", part) for label, part in parts.items() if part is not None}

    # ---- objects

    def _described(self, value: Any) -> Json:
        cls = type(value)
        own = self._at(".__zcache_fingerprint__()", value.__zcache_fingerprint__())
        return ["described", module_name(cls.__module__), cls.__qualname__, own]

    def _object(self, value: Any) -> Json:
        cls = type(value)
        if is_named(value):
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
        try:
            if isinstance(value, Iterator):
                raise TypeError("an iterator changes with every use")  # noqa: TRY301 - one message for both refusals
            parts = value.__reduce_ex__(2)
        except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
            raise self._refuse(value, f"its state cannot be inspected ({error})") from error
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
        (enum.Enum, _enum),
        (np.ma.MaskedArray, _masked),
        (np.ndarray, _array),
        (np.generic, _scalar),
        (np.dtype, lambda _, value: dtype_form(value)),
        (PurePath, lambda _, value: ["path", value.as_posix()]),
        (types.FunctionType, _function),
        (types.BuiltinFunctionType, _builtin),
        (types.MethodWrapperType, _builtin),
        (_C_DESCRIPTORS, _descriptor),
        (types.MethodType, _method),
        (functools.partial, _partial),
        (type, _class),
        (types.ModuleType, _module),
        (types.UnionType, lambda self, value: ["union", self._items(value.__args__)]),
        (re.Pattern, lambda self, value: ["pattern", self._visit(value.pattern), value.flags]),
        (logging.Logger, lambda _, value: ["logger", value.name]),
        (_RANDOM, _refuse_random),
        ((io.IOBase, threading.local, types.GeneratorType), _refuse_live),
    )
    _BASES = (*UNDERLYING, OrderedDict, dict, list, tuple, set, frozenset)
