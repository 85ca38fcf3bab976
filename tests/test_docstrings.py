"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import zcache

MODULES = sorted(m.name for m in pkgutil.walk_packages(zcache.__path__, "zcache."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_module_says_what_it_is_for():
    undocumented = [name for name in MODULES if not importlib.import_module(name).__doc__]
    assert undocumented == []


@pytest.mark.parametrize("name", ["zcache", *MODULES])
def test_all_is_sorted_and_true(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert list(names) == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)), name
    assert all(hasattr(module, n) for n in names)
