"""The package's face: names that load on use, quickly, and one tree of errors."""

from __future__ import annotations

import importlib
import inspect

import pytest

import zcache
from tests.support import run_script
from zcache import errors


@pytest.mark.parametrize("name", zcache.__all__)
def test_every_public_name_is_there_and_belongs_to_its_room(name):
    value = getattr(zcache, name)
    room = importlib.import_module(zcache._ROOMS[name])
    assert value is getattr(room, name)
    assert value.__module__.startswith("zcache.")
    assert name in room.__all__
    assert value.__doc__


def test_the_lists_of_names_agree():
    assert zcache.__all__ == sorted(zcache.__all__)
    assert sorted(zcache._ROOMS) == zcache.__all__
    assert set(zcache.__all__) <= set(dir(zcache))
    assert dir(zcache) == sorted(dir(zcache))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'zcache' has no attribute 'LMDBDataset'"):
        zcache.LMDBDataset  # noqa: B018
    assert not hasattr(zcache, "_nothing")


@pytest.mark.parametrize("problem", ["AttributeError", "ImportError", "ModuleNotFoundError"])
def test_what_fails_behind_a_name_is_told(problem, tmp_path):
    """`from … import` takes an AttributeError for a name that is not there."""
    (tmp_path / "monai.py").write_text(f"raise {problem}('numpy has no bool8')")
    printed = run_script(
        """
        for _ in range(2):
            try:
                from zcache import PersistentDataset
            except ImportError as e:
                print(e, type(e.__cause__ or e).__name__, sep="|")
        """,
        folder=tmp_path,
    )
    message = "numpy has no bool8"
    if problem == "AttributeError":
        message = f"zcache.PersistentDataset cannot be imported, since a module that it needs failed: {message}"
    assert printed.splitlines() == [f"{message}|{problem}"] * 2


def test_importing_the_package_or_the_cache_imports_neither_torch_nor_monai(tmp_path):
    printed = run_script(
        """
        import sys
        import zcache
        light = sorted({"torch", "monai", "numpy", "zarr"} & set(sys.modules))
        zcache.Cache, zcache.CacheStats, zcache.ZCacheError
        print(light, sorted({"torch", "monai"} & set(sys.modules)))
        """,
        folder=tmp_path,
    )
    assert printed == "[] []"


def test_all_errors_are_of_one_tree():
    found = {n: e for n, e in vars(errors).items() if inspect.isclass(e) and issubclass(e, BaseException)}
    assert sorted(found) == sorted(errors.__all__)
    for name, error in found.items():
        assert issubclass(error, UserWarning if name.endswith("Warning") else errors.ZCacheError)
        assert error.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.CacheConfigError, ValueError),
        (errors.FingerprintError, TypeError),
        (errors.UnstorableError, TypeError),
        (errors.EntryDamagedError, OSError),
        (errors.CacheWriteError, OSError),
    ],
)
def test_errors_are_caught_as_the_builtins_that_they_are(error, builtin):
    with pytest.raises(builtin, match="why") as e:
        raise error("why")
    assert isinstance(e.value, zcache.ZCacheError)
    assert str(e.value) == "why"
