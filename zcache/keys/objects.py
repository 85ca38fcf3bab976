"""What an object is made of: whose code its class is, and which of its attributes say what it does."""

from __future__ import annotations

import builtins
import functools
import struct
import sys
import types
from typing import Any

import numpy as np

from zcache.keys.modules import is_library

__all__ = [
    "C_DESCRIPTORS",
    "attributes",
    "is_generated",
    "is_library_class",
    "is_named",
    "module_name",
    "needs_reduce",
    "own_attribute",
]

# Attributes that MONAI's transforms and readers write while they work.
_TRANSIENT = {
    "NibabelReader": ("filenames",),
    "PydicomReader": ("filenames", "has_series"),
    "RandomizableTransform": ("_do_transform",),
    "RangePush": ("depth",),
    "SaveImage": ("writer_obj", "_data_index"),
    "SavitzkyGolaySmooth": ("img_t",),
    "TraceableTransform": ("_tracing",),
}
# Written by `dataclass` from the fields: they vary between Python versions, and the fields say all that they do.
_GENERATED = frozenset(
    f"__{name}__"
    for name in (
        "init",
        "repr",
        "eq",
        "lt",
        "le",
        "gt",
        "ge",
        "hash",
        "replace",
        "setattr",
        "delattr",
        "getstate",
        "setstate",
    )
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while the program runs
_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the instance dictionary does not count in the size
C_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Types of the attributes of classes that are written in C."""
_POINTER = struct.calcsize("P")


def is_library_class(cls: type) -> bool:
    """Tell whether a class belongs to an installed library, so that its name says what it does.

    Parameters
    ----------
    cls : type
        Any class.

    Returns
    -------
    bool
        See `is_library`.

    Examples
    --------
    >>> is_library_class(np.ndarray)
    True
    """
    if cls.__module__ == "builtins":  # also what `exec` in a bare namespace calls a new class's module
        return not cls.__flags__ & _HEAP_TYPE or getattr(builtins, cls.__name__, None) is cls
    return is_library(cls.__module__)


def is_named(value: Any) -> bool:
    """Tell whether a value is what a library has under the value's own module and name.

    Parameters
    ----------
    value : object
        A function or another callable.

    Returns
    -------
    bool
        True if the name says all there is to say.

    Examples
    --------
    >>> is_named(np.mean), is_named(lambda: 0)
    (True, False)
    """
    module, name = getattr(value, "__module__", None), own_attribute(value, "__qualname__")
    if not isinstance(module, str) or not isinstance(name, str) or not is_library(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def own_attribute(value: object, name: str, default: Any = None) -> Any:
    """Read an attribute without asking ``__getattr__``.

    That one answers to any name in mocks and raises anything in proxies.

    Parameters
    ----------
    value : object
        Any object.
    name : str
        The attribute.
    default : object
        What to return where the object has none.

    Returns
    -------
    object
        The attribute or the default.

    Examples
    --------
    >>> own_attribute(np.mean, "__qualname__"), own_attribute(3, "__qualname__")
    ('mean', None)
    """
    try:
        return type(value).__getattribute__(value, name)
    except AttributeError:
        return default


def module_name(name: str) -> str:
    """Return the name of a module in the process that the program was started in.

    Parameters
    ----------
    name : str
        The name here.

    Returns
    -------
    str
        The same, or ``__main__`` for what a spawned process calls ``__mp_main__``.

    Examples
    --------
    >>> module_name("__mp_main__")
    '__main__'
    """
    return "__main__" if name == "__mp_main__" else name


def is_generated(cls: type, name: str, member: object) -> bool:
    """Tell whether a member of a class was written by `dataclass` or `namedtuple`, not by the user.

    Parameters
    ----------
    cls : type
        The class.
    name : str
        The name of the member.
    member : object
        The member.

    Returns
    -------
    bool
        True if the fields of the class say all that the member does.

    Examples
    --------
    >>> from collections import namedtuple
    >>> Window = namedtuple("Window", "level width")
    >>> is_generated(Window, "__new__", vars(Window)["__new__"])
    True
    """
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and name in {"__new__", "_make", "_replace", "__replace__"}:
        return True
    if name not in _GENERATED or "__dataclass_fields__" not in vars(cls) or not isinstance(member, types.FunctionType):
        return False
    return member.__code__.co_filename == "<string>" or is_library(member.__globals__.get("__name__"))


def attributes(value: object) -> dict[str, Any]:
    """Collect the attributes that say what an object does.

    Parameters
    ----------
    value : object
        Any object.

    Returns
    -------
    dict
        Its instance dictionary and slots, sorted by name, without random state called ``R``, without the values of
        cached properties, and without what MONAI's transforms note down while they work.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> attributes(SimpleNamespace(width=2, level=1, R=np.random.RandomState(0)))
    {'level': 1, 'width': 2}
    """
    cls: type = type(value)
    state = {name: getattr(value, name) for name in _slots(cls) if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    skipped = _transient(cls)
    return {
        name: state[name]
        for name in sorted(state)
        if name not in skipped
        and not (name == "R" and isinstance(state[name], np.random.RandomState))
        and not isinstance(getattr(cls, name, None), functools.cached_property)  # there from its first use on
    }


def needs_reduce(cls: type) -> bool:
    """Tell whether instances of a class hold more than their instance dictionary and slots, as C types do.

    Parameters
    ----------
    cls : type
        Any class.

    Returns
    -------
    bool
        True if `attributes` does not show all; by the rule that `object.__reduce_ex__` uses.

    Examples
    --------
    >>> import datetime
    >>> needs_reduce(datetime.date), needs_reduce(type("Scale", (), {}))
    (True, False)
    """
    expected = object.__basicsize__ + _POINTER * len(_slots(cls))
    if cls.__dictoffset__ and not cls.__flags__ & _MANAGED_DICT:
        expected += _POINTER
    if cls.__weakrefoffset__ > 0:
        expected += _POINTER
    return cls.__basicsize__ > expected or cls.__itemsize__ > 0


@functools.lru_cache(maxsize=4096)
def _transient(cls: type) -> frozenset[str]:
    """Return what MONAI's transforms of a class note down while they work."""
    monais = (base.__name__ for base in cls.__mro__ if base.__module__.startswith("monai."))
    return frozenset(name for base in monais for name in _TRANSIENT.get(base, ()))


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> list[str]:
    """List the attributes in slots, under the names that they are stored by."""
    names = []
    for base in cls.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in [declared] if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            if name not in {"__dict__", "__weakref__"}:
                names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names
