"""Whose code a module is, and what the source of the user's modules says as a whole.

A function that imports where it runs is not followed name by name: the module may not be there yet, and to import it
early could change what the program does. It counts with the normalised source of the whole module, and of those of the
user's modules that this one imports, wherever it does. Nothing is imported to find out.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from zcache.keys.functions import normalised
from zcache.keys.scan import Import, Reach, nested_codes, scan

__all__ = ["Source", "absolute", "changed", "imported", "is_library", "sources", "version"]

# Told by name and version wherever they are installed: MONAI's and NVIDIA's images have them outside of site-packages.
_LIBRARIES = frozenset({"monai", "torch", "torchvision", "numpy", "scipy", "skimage", "nibabel", "itk", "zcache"})
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep  # noqa: PTH100, PTH120 - lexical, as module files are
_INSTALLED = frozenset({"site-packages", "dist-packages"})


_NOTHING = Reach((), (), (), (), ())


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a module of the user's says.

    Attributes
    ----------
    digest : str
        Hash of its normalised source, of the bytes of an extension module; empty for a folder without ``__init__.py``.
    reach : Reach
        What it reaches for.
    codes : frozenset of CodeType
        The code of all that it defines.
    literals : mapping of str to object
        Its global variables that are literals, and their values.
    functions, classes : frozenset of str
        The names that it defines itself, without decorators.
    """

    digest: str
    reach: Reach = _NOTHING
    codes: frozenset[types.CodeType] = frozenset()
    literals: Mapping[str, Any] = field(default_factory=dict)
    functions: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()


_files: dict[str, tuple[tuple[int, int], Source]] = {}
_loaded: weakref.WeakKeyDictionary[types.ModuleType, Source] = weakref.WeakKeyDictionary()


def is_library(module: str | None) -> bool:
    """Tell whether a module belongs to an installed library rather than to the user.

    Parameters
    ----------
    module : str or None
        The name of a module.

    Returns
    -------
    bool
        True for the standard library, for what was installed from an index, and for MONAI, PyTorch and NumPy wherever
        they lie. What was installed from a folder or a repository, editable or not, is the user's own code.

    Examples
    --------
    >>> is_library("json"), is_library("numpy.linalg"), is_library("__main__")
    (True, True, False)
    """
    if module is None or module in {"__main__", "__mp_main__"}:
        return False
    top = module.partition(".")[0]
    if top in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return top in sys.builtin_module_names or top in sys.stdlib_module_names
    return _is_library_file(top, file)


def version(top: str) -> str | None:
    """Return the version of an installed library, None if it has none that can be found.

    Parameters
    ----------
    top : str
        The name that it is imported by.

    Examples
    --------
    >>> import numpy
    >>> version("numpy") == numpy.__version__
    True
    """
    own = getattr(sys.modules.get(top), "__version__", None)
    return own if isinstance(own, str) else _distribution_version(top)


def absolute(level: int, module: str, package: str | None) -> str | None:
    """Return the full name of a module that an import statement names, None if it leads out of its package."""
    if not level:
        return module
    try:
        return importlib.util.resolve_name("." * level + module, package)
    except ImportError:  # without a package, or beyond its top
        return None


def imported(statement: Import, package: str | None) -> list[str]:
    """Return the modules that an import statement may run: those it names, and the packages that they lie in."""
    name = absolute(statement.level, statement.module, package)
    if name is None:
        return []
    names = [name, *(f"{name}.{part}" for part in statement.names)]
    parents = [name[:at] for at, letter in enumerate(name) if letter == "."]
    return [*parents, name, *(one for one in names[1:] if not is_library(name) and _find(one) is not None)]


def sources(names: list[str]) -> tuple[dict[str, Source | None], set[str]]:
    """Collect the source of the user's modules, and of all of the user's modules that they import.

    Parameters
    ----------
    names : list of str
        Full names of modules.

    Returns
    -------
    found : dict of str to Source
        By name; None for a module that is not there.
    libraries : set of str
        The first names of the libraries that any of them imports.
    """
    found: dict[str, Source | None] = {}
    libraries = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        spec = _find(name)
        if is_library(name) or (spec is not None and _is_library_spec(name, spec)):
            libraries.add(name.partition(".")[0])
            continue
        found[name] = source = _source(name, spec)
        if source is not None:
            locations = spec.submodule_search_locations if spec is not None else None
            package = name if locations is not None else name.rpartition(".")[0]
            waiting += [one for statement in source.reach.imports for one in imported(statement, package)]
    return found, libraries


def changed(name: str, source: Source) -> Iterator[tuple[str, Any]]:
    """Yield what a module that is loaded holds in place of what its source says, by name.

    Variables that were set and functions that were replaced while the program runs, and code that was imported before
    the file was edited. A variable whose value is not a literal in the source is not told apart.
    """
    module = sys.modules.get(name)
    if module is None:
        return
    held = vars(module)
    for variable, literal in source.literals.items():
        if variable in held and (type(held[variable]) is not type(literal) or repr(held[variable]) != repr(literal)):
            yield variable, held[variable]
    for function in sorted(source.functions):
        if function in held and not _runs(held[function], source):
            yield function, held[function]
    for cls in sorted(source.classes):
        members = vars(held[cls]).values() if isinstance(held.get(cls), type) else ()
        own = [m for m in members if isinstance(m, types.FunctionType) and m.__code__.co_filename != "<string>"]
        if cls in held and not (isinstance(held[cls], type) and all(_runs(member, source) for member in own)):
            yield cls, held[cls]


def _runs(value: object, source: Source) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__ in source.codes


def _find(name: str) -> Any:
    """Find the spec of a module as an import would, without importing it or its packages."""
    spec, path = None, None
    for at in [*(at for at, letter in enumerate(name) if letter == "."), len(name)]:
        part = name[:at]
        module = sys.modules.get(part)
        spec = getattr(module, "__spec__", None)
        if spec is None and getattr(module, "__file__", None):  # the script that runs has none
            spec = importlib.util.spec_from_file_location(part, module.__file__)  # type: ignore[union-attr]
        if module is None:
            finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
            spec = next((found for find in finders if find and (found := find(part, path)) is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _source(name: str, spec: Any) -> Source | None:
    module = sys.modules.get(name)
    if module is not None and module in _loaded:  # what is loaded stays, whatever becomes of the file
        return _loaded[module]
    origin = None if spec is None else spec.origin
    if origin is None:
        return None if spec is None else Source("")  # a folder is a package without a file
    try:
        status = os.stat(origin)  # noqa: PTH116 - as a module file
        stamp = (status.st_size, status.st_mtime_ns)
        known = _files.get(origin)
        source = known[1] if known is not None and known[0] == stamp else _parsed(Path(origin).read_bytes(), origin)
    except OSError:  # from a zip file, or gone since
        return None
    _files[origin] = (stamp, source)
    if module is not None:
        _loaded[module] = source
    return source


def _parsed(data: bytes, origin: str) -> Source:
    try:
        tree = ast.parse(data)
        code = compile(data, origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # an extension module, or nothing that could be imported
        return Source(blake2b(data, digest_size=16).hexdigest())
    form = ascii(normalised(tree)).encode("ascii")
    literals: dict[str, Any] = {}
    functions, classes = set(), set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            try:
                value = ast.literal_eval(statement.value)
            except (ValueError, TypeError, SyntaxError, RecursionError):
                continue
            literals |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not statement.decorator_list:
            functions.add(statement.name)
        elif isinstance(statement, ast.ClassDef) and not statement.decorator_list:
            classes.add(statement.name)
    return Source(
        blake2b(form, digest_size=16).hexdigest(),
        scan(code),
        frozenset(nested_codes(code)),
        literals,
        frozenset(functions),
        frozenset(classes),
    )


def _is_library_spec(name: str, spec: Any) -> bool:
    return bool(spec.origin) and spec.has_location and _is_library_file(name.partition(".")[0], spec.origin)


@lru_cache(maxsize=4096)
def _is_library_file(top: str, file: str) -> bool:
    path = os.path.abspath(file)  # noqa: PTH100 - lexical, and without a Path per call
    parts = path.split(os.sep)  # noqa: PTH206 - as above
    if not _INSTALLED.isdisjoint(parts):
        folder = os.sep.join(parts[: max(at for at, part in enumerate(parts) if part in _INSTALLED) + 1])  # noqa: PTH118 - as above
        return top not in _own_installs(folder)
    return path.startswith(_STDLIB)


@lru_cache
def _own_installs(folder: str) -> frozenset[str]:
    """List what was installed into a folder from another folder or a repository: its version says nothing.

    Such installations leave a note of where they came from (PEP 610). conda leaves one in all that it builds.
    """
    names: set[str] = set()
    for note in Path(folder).glob("*.dist-info/direct_url.json"):
        distribution = importlib.metadata.Distribution.at(note.parent)
        try:
            told = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            told = {}
        if ("dir_info" in told or "vcs_info" in told) and (
            distribution.read_text("INSTALLER") or ""
        ).strip() != "conda":
            files = (str(file) for file in distribution.files or ())
            names |= {file.partition("/")[0].removesuffix(".py") for file in files if not file.startswith("..")}
    return frozenset(names)


@lru_cache
def _distribution_version(top: str) -> str | None:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top)
        return importlib.metadata.version(names[0]) if names else None
