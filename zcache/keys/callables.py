"""Functions, classes and modules: the steps of the walk that say what the user's code does.

Precise where code is followed: what a function finds under its global names, constant keys of dictionaries and
attributes of plain namespaces one by one. Coarse where it is not: the source of whole modules. Refused where neither
can be: code that is made while the program runs.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from zcache.keys.functions import code_digest
from zcache.keys.modules import Source, absolute, changed, imported, sources
from zcache.keys.objects import C_DESCRIPTORS, is_generated, is_library_class, is_named, module_name
from zcache.keys.scan import Import, Load, Reach, scan
from zcache.keys.values import Json, digest
from zcache.keys.walk import Walk

__all__ = ["CodeWalk"]

_MEMBERS_SKIPPED = frozenset({"_abc_impl", "__annotate__", "__annotate_func__", "__classcell__"})
# Plain namespaces, of which only the attributes that are read count.
_NAMESPACES = frozenset({("types", "SimpleNamespace"), ("argparse", "Namespace")})
# What leads to the environment, and to code that no walk sees, under whatever name it is reached.
_ROOTS: dict[int, tuple[str, ...]] = {
    id(os): ("os",),
    id(os.environ): ("os", "environ"),
    id(os.getenv): ("os", "getenv"),
    id(importlib): ("importlib",),
    id(importlib.import_module): ("importlib", "import_module"),
    id(sys): ("sys",),
    id(sys.modules): ("sys", "modules"),
}
_ENVIRONMENT_READS = frozenset({"getenv", "get", "pop", "setdefault", "__getitem__", "__contains__"})


class CodeWalk(Walk):
    """Describes functions, classes and modules."""

    def _module(self, value: types.ModuleType) -> Json:
        """Describe a module that is used as a whole, such as by ``getattr(module, name)``."""
        name = module_name(value.__name__)
        if self._told_by_name(value.__name__):
            return ["module", name]
        if getattr(value, "__file__", None) is None and getattr(value, "__path__", None) is None:  # made at run time
            own = {key: part for key, part in vars(value).items() if not key.startswith("__")}
            return self._define(value, lambda: ["module", name, self._visit(own)])
        return ["module", self._sources([value.__name__])]

    def _function(self, function: Any) -> Json:
        code = function.__code__
        if is_named(function) and code.co_name != "<lambda>":
            self._told_by_name(function.__module__)
            return ["function", function.__module__, function.__qualname__]
        if isinstance(getattr(function, "registry", None), Mapping) and code.co_filename == functools.__file__:
            return self._define(function, lambda: self._single_dispatch(function))
        return self._define(function, lambda: self._function_form(function))

    def _single_dispatch(self, function: Any) -> Json:
        """Describe a `functools.singledispatch` by its registry: its cache of classes changes with use."""
        registry = [[self._class(cls), self._at(f"[{cls.__name__}]", part)] for cls, part in function.registry.items()]
        return ["singledispatch", registry]

    def _function_form(self, function: Any) -> Json:
        code, module = function.__code__, function.__globals__.get("__name__")
        library = self._told_by_name(module)
        # The inner function of a library's decorator is told by its name, and what it wraps is in its closure.
        by_name = library and code.co_name != "<lambda>"
        form: dict[str, Json] = {"code": [module, code.co_qualname] if by_name else code_digest(function)}
        with self._inside(f".<{function.__name__}>"):
            form.update(self._closure(function, followed=not library))
            if function.__defaults__:
                form["defaults"] = self._at(".<defaults>", function.__defaults__)
            if function.__kwdefaults__:
                form["kwdefaults"] = self._at(".<defaults>", function.__kwdefaults__)
            if not library:
                reach, namespace = scan(code), function.__globals__
                for load in reach.globals:
                    form.update(self._global(namespace, load, "global"))
                form.update(self._reach(reach, namespace, self._imported(reach.imports, namespace)))
                attributes = {key: value for key, value in vars(function).items() if not key.startswith("__")}
                if attributes:
                    form["attributes"] = self._at(".<attributes>", attributes)
        return form

    def _closure(self, function: Any, *, followed: bool) -> dict[str, Json]:
        form: dict[str, Json] = {}
        loads = scan(function.__code__).free if followed else ()
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                namespace = {variable: cell.cell_contents}
            except ValueError:  # the enclosing function has not set it yet
                form[f"closure {variable}"] = ["empty"]
                continue
            own = [load for load in loads if load.chain[0] == variable] or [Load((variable,))]
            for load in own:
                form.update(self._global(namespace, load, "closure"))
        return form

    def _global(self, namespace: dict[str, Any], load: Load, kind: str) -> dict[str, Json]:
        """Describe what a function finds under a name; built-in and unset names say nothing more."""
        first, *rest = load.chain
        if first not in namespace:
            return self._special(("builtins", *load.chain), load, namespace) or {}
        value, used = namespace[first], [first]
        while True:
            root = _ROOTS.get(id(value))
            special = None if root is None else self._special((*root, *rest), load, namespace)
            if special is not None:
                return special
            if not rest or not self._is_transparent(value) or rest[0] not in vars(value):
                break
            used.append(rest.pop(0))
            value = vars(value)[used[-1]]
        if not rest and load.how == "subscript" and type(value) is dict and load.text in value:
            value = value[load.text]
            used.append(str(load.text))
        dotted = ".".join(used)
        return {f"{kind} {dotted}": self._at(f".<{kind} {dotted}>", value)}

    def _is_transparent(self, value: object) -> bool:
        """Tell whether of a value only the attribute counts that is read from it."""
        if isinstance(value, types.ModuleType):
            return not self._told_by_name(value.__name__)
        return (type(value).__module__, type(value).__qualname__) in _NAMESPACES

    # ---- what leads out of the walk

    def _special(
        self, dotted: tuple[str, ...], load: Load, namespace: Mapping[str, Any], *, refused: bool = True
    ) -> dict[str, Json] | None:
        """Describe a look-up of environment variables, or of code by its name; None if it is neither."""
        operand = load.text if load.text is not None else namespace.get(load.variable or "")
        name = operand if isinstance(operand, str) else None
        form: dict[str, Json] | None = {}
        match dotted:
            case ("os", "environ", method) | ("os", "environ" | "getenv" as method) if name is not None and (
                method in _ENVIRONMENT_READS or load.how != "call"
            ):
                self.variables.add(name)
                value = os.environ.get(name)  # hashed: it may be a password
                form = {f"environment {name}": None if value is None else digest(value)}
            case ("os", "environ" | "getenv", *_):
                self._remark("reads environment variables, and not each under a constant name")
            case ("importlib", "import_module") | ("builtins", "__import__") | ("sys", "modules") if name is not None:
                level = len(name) - len(name.lstrip("."))
                form = self._imported((Import(level, name[level:], ()),), namespace)
            case ("builtins", "globals"):
                form = self._sources([str(namespace.get("__name__"))])
            case (
                ("importlib", "import_module" | "reload")
                | ("builtins", "__import__" | "eval" | "exec")
                | ("sys", "modules")
            ):
                called = ".".join(dotted[dotted[0] == "builtins" :])
                if refused:
                    raise self._refuse(load.chain, f"{called} reaches code that cannot be told in advance")
                self._remark(f"{called} reaches code that cannot be told in advance")
            case ("builtins", *_):
                pass
            case _:
                form = None
        return form

    def _reach(
        self, reach: Reach, namespace: Mapping[str, Any], form: dict[str, Json], *, refused: bool = True
    ) -> dict[str, Json]:
        """Add what code reaches by names that it imports itself, and the files that it names."""
        for load in reach.imported:
            form.update(self._special(load.chain, load, namespace, refused=refused) or {})
        for text in reach.strings:
            file = self._file(text)
            if file is not None:
                form[f"file {text}"] = file
        return form

    def _imported(self, imports: tuple[Import, ...], namespace: Mapping[str, Any]) -> dict[str, Json]:
        own = str(namespace.get("__name__"))
        package = namespace.get("__package__") or (own if "__path__" in namespace else own.rpartition(".")[0])
        names = []
        for statement in imports:
            if absolute(statement.level, statement.module, package) is None:
                raise self._refuse(statement, "an import that leads out of its package")
            names += imported(statement, package)
        return self._sources(names)

    def _sources(self, names: list[str]) -> dict[str, Json]:
        """Describe modules of the user's by their whole source, with all of the user's that they import."""
        found, libraries = sources(names)
        self.libraries |= libraries
        form: dict[str, Json] = {}
        for name, source in sorted(found.items()):
            label = f"module {module_name(name)}"
            if source is not None:
                form[label] = source.digest
                form[f"{label} holds"] = self._define(source, functools.partial(self._held, name, source))
            elif name in sys.modules:
                raise self._refuse(sys.modules[name], f"the source of module {name} is not at hand")
            else:
                form[label] = None
        return form

    def _held(self, name: str, source: Source) -> dict[str, Json]:
        """Describe what a module reaches for, and holds in place of what its source says."""
        form: dict[str, Json] = {}
        with self._inside(f".<module {name}>"):
            for load in source.reach.globals:
                form.update(self._special(("builtins", *load.chain), load, {"__name__": name}, refused=False) or {})
            self._reach(source.reach, {"__name__": name}, form, refused=False)
            for variable, value in changed(name, source):
                form[f"set {variable}"] = self._at(f".{variable}", value)
        return form

    # ---- callables and classes

    def _builtin(self, value: Any) -> Json:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            module = value.__module__ or "builtins"
            form: list[Json] = ["builtin", module, value.__qualname__]
            return form if self._told_by_name(module) else [*form, self._sources([module])]
        return ["builtin method", value.__name__, self._at(".__self__", owner)]

    def _descriptor(self, value: Any) -> Json:
        return ["builtin descriptor", self._visit(value.__objclass__), value.__name__]

    def _method(self, value: types.MethodType) -> Json:
        return ["method", self._visit(value.__func__), self._at(".__self__", value.__self__)]

    def _enum(self, value: enum.Enum) -> Json:
        form: list[Json] = ["enum", module_name(type(value).__module__), type(value).__qualname__, value._name_]
        if self._told_by_name(type(value).__module__):
            return form
        return [*form[:1], *form[2:], self._at(".value", value._value_)]  # a user's class: by content, not by module

    def _class(self, cls: type) -> Json:
        if is_library_class(cls):
            self._told_by_name(cls.__module__)
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
        elif isinstance(member, C_DESCRIPTORS) or type(member).__name__ == "_tuplegetter":
            return {}
        elif name.startswith("__") and name.endswith("__") and not isinstance(member, types.FunctionType):
            return {}  # what Python notes down: __doc__, __module__, __annotations__, __slots__
        return {f"member {label}": self._at(f".{label}", part) for label, part in parts.items() if part is not None}

    code_kinds: ClassVar[tuple[tuple[type | tuple[type, ...], Callable[[Any, Any], Json]], ...]] = (
        (types.FunctionType, _function),
        (types.BuiltinFunctionType, _builtin),
        (types.MethodWrapperType, _builtin),
        (C_DESCRIPTORS, _descriptor),
        (types.MethodType, _method),
        (type, _class),
        (types.ModuleType, _module),
    )
    """Which value is described how: the first that fits."""
