"""Enum members by name: found among what the process has imported already, without running anything on the way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from types import ModuleType
from typing import Any

from zcache.errors import EntryDamagedError, UnstorableError

__all__ = ["decode_enum", "encode_enum"]

# The slots themselves. Attribute access could run code that a name on disk chose: a module that loads itself, or
# others, when it is looked into; a property; a class's or its metaclass's __getattr__.
_MODULE_DICT = vars(ModuleType)["__dict__"]
_CLASS_DICT = vars(type)["__dict__"]


def encode_enum(value: Enum, path: str) -> list[str]:
    """Return where a member is found: module, class, name.

    Raises
    ------
    UnstorableError
        It would not be found there.
    """
    kind = type(value)
    if value.name is None or kind.__members__.get(value.name) is not value:
        raise UnstorableError(f"{path or 'the item'} is {value!r}, a combination of flags without a name of its own")
    body = [kind.__module__, kind.__qualname__, value.name]
    try:
        found = decode_enum(body)
    except (EntryDamagedError, KeyError, TypeError):
        found = None
    if found is not value:
        raise UnstorableError(
            f"{path or 'the item'} is {value!r} of the enum {'.'.join(body[:2])}, which is not found again under this "
            "name: define the enum at the top level of a module"
        )
    return body


def decode_enum(body: Any) -> Enum:
    """Return the member that `encode_enum` described.

    Raises
    ------
    EntryDamagedError
        No class of this name is an enum that the process has imported.
    KeyError, TypeError, ValueError
        The enum has no such member, or `body` is no description.
    """
    module_name, qualname, member = (str(part) for part in body)
    return _member(module_name, qualname, member)


@lru_cache(maxsize=1024)  # MONAI's traces consist of these
def _member(module_name: str, qualname: str, member: str) -> Enum:
    found: Any = sys.modules.get(module_name)
    for name in qualname.split("."):
        found = _namespace(found).get(name)
    if not (issubclass(type(found), type) and issubclass(found, Enum)):
        where = f"{module_name}.{qualname}"
        raise EntryDamagedError(
            f"the entry holds a member of {where!r:.100}, which is no enum that this process has imported"
        )
    value: Enum = found.__members__[member]
    return value


def _namespace(holder: Any) -> Mapping[str, Any]:
    """Return what is defined in a module or class; nothing for other objects."""
    kind = type(holder)  # not isinstance, which asks an object for its __class__
    if issubclass(kind, ModuleType):
        names: Mapping[str, Any] = _MODULE_DICT.__get__(holder)
    elif issubclass(kind, type):
        names = _CLASS_DICT.__get__(holder)
    else:
        names = {}
    return names
