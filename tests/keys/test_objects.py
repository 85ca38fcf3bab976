"""What belongs to a library, and which attributes say what an object does."""

import sys
import types

import monai.transforms as mt
import pytest

from zcache.keys.modules import is_library
from zcache.keys.objects import attributes, is_library_class, is_named, needs_reduce


@pytest.mark.parametrize("name", ["json", "os.path", "math", "torch.nn", "monai.data", "pytest", "zcache.keys.objects"])
def test_libraries(name):
    assert is_library(name)


@pytest.mark.parametrize("name", ["__main__", "__mp_main__", __name__, "no_such_module", None])
def test_the_users_modules(name):
    assert not is_library(name)


@pytest.mark.parametrize("folder", ["/opt/monai", "/home/me/project"])
def test_monai_is_a_library_wherever_it_lies_and_the_project_is_not(folder, monkeypatch):
    name = "monai.somewhere" if "monai" in folder else "my_project"
    module = types.ModuleType(name)
    module.__file__ = f"{folder}/x.py"
    monkeypatch.setitem(sys.modules, name, module)
    assert is_library(name) == ("monai" in folder)


def test_a_class_made_in_a_bare_namespace_is_the_users():
    namespace = {}
    exec("class Scale: pass", namespace)
    assert namespace["Scale"].__module__ == "builtins"
    assert not is_library_class(namespace["Scale"])
    assert is_library_class(int)
    assert is_library_class(types.FunctionType)


def test_named_values_of_libraries():
    assert is_named(mt.adaptor)
    assert not is_named(mt.Flip(0))
    assert not is_named(test_named_values_of_libraries)


def test_attributes_of_slots_and_dictionaries():
    class Base:
        __slots__ = ("_Base__a", "unset")

    class Both(Base):
        def __init__(self):
            self._Base__a, self.b = 1, 2

    assert attributes(Both()) == {"_Base__a": 1, "b": 2}
    assert not needs_reduce(Both)
    assert needs_reduce(range)
