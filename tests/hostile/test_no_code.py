"""No code runs because a cache says so: no import, no other file, no attribute access that a name on disk chose."""

from __future__ import annotations

import base64
import enum
import json
import sys
import types
from collections.abc import Mapping

import numpy as np
import pytest

from tests.hostile.jail import MIB, run
from zcache.encoding.payload import decode_item, encode_item
from zcache.errors import EntryDamagedError, UnstorableError

N_WATCHED = 150


class Colour(enum.Enum):
    RED = 1


class _AlarmError(BaseException):
    """Code ran that no entry may run; not an Exception, so that nothing on the way catches it."""


def _alarm(*_args, **_kwargs):
    raise _AlarmError


@pytest.fixture
def traps(monkeypatch):
    """A module of objects that sound the alarm when they are touched, and modules that do so themselves."""

    class LazyModule(types.ModuleType):
        """As importlib's and other packages': it loads itself as soon as anything in it is asked for."""

        def __getattribute__(self, name):
            _alarm()

    class LazyMapping(Mapping):
        """As transformers' table of models, which imports what is looked up."""

        __getitem__ = get = __iter__ = __len__ = __contains__ = _alarm

    class Proxy:
        """As werkzeug's and wrapt's: whatever is asked of it is asked of something else, its class too."""

        __class__ = property(_alarm)
        __dict__ = property(_alarm)
        __getattr__ = _alarm

    class Meta(type):
        __getattr__ = __instancecheck__ = __subclasscheck__ = _alarm

        def __getattribute__(cls, name):
            _alarm()

    class Touchy(metaclass=Meta):
        pass

    module = types.ModuleType("traps")
    vars(module).update(
        mapping=LazyMapping(), proxy=Proxy(), touchy=Touchy, colour=Colour, function=_alarm, lazy=LazyModule("lazy")
    )
    monkeypatch.setitem(sys.modules, "traps", module)
    monkeypatch.setitem(sys.modules, "traps.lazy", LazyModule("traps.lazy"))
    monkeypatch.setitem(sys.modules, "traps.proxy", Proxy())
    return module


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("traps", "mapping"),
        ("traps", "mapping.BertModel"),
        ("traps", "proxy"),
        ("traps", "proxy.x"),
        ("traps", "touchy"),
        ("traps", "touchy.x"),
        ("traps", "function"),
        ("traps", "function.__globals__"),
        ("traps", "colour.__class__"),
        ("traps", "colour.RED"),
        ("traps", "lazy.x"),
        ("traps.lazy", "x"),
        ("traps.proxy", "x"),
        ("traps", ""),
        ("", ""),
        ("traps", "__builtins__.eval"),
        ("os", "system"),
        ("os", "environ"),
        ("builtins", "type"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("sys", "modules"),
        ("enum", "Enum"),
    ],
)
def test_looking_an_enum_up_touches_nothing(traps, module, qualname):
    for member in ("RED", "PATH", "__class__", "mro", "x"):
        with pytest.raises(EntryDamagedError):
            decode_item({"$enum": [module, qualname, member]}, {}.get)


def test_enums_are_found_in_modules_of_any_kind(traps):
    assert decode_item({"$enum": ["traps", "colour", "RED"]}, {}.get) is Colour.RED
    shade = enum.Enum("Shade", ["DARK"], module="traps.lazy", qualname="Shade")
    types.ModuleType.__dict__["__dict__"].__get__(sys.modules["traps.lazy"])["Shade"] = shade
    assert encode_item(shade.DARK).tree == {"$enum": ["traps.lazy", "Shade", "DARK"]}
    assert decode_item({"$enum": ["traps.lazy", "Shade", "DARK"]}, {}.get) is shade.DARK


@pytest.mark.parametrize(
    "tree",
    [
        {"$reduce": ["os", "system", "true"]},
        {"$import": "antigravity"},
        {"$eval": "1"},
        {"$pickle": "gASVHQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu"},
        {"$object": ["collections", "OrderedDict"]},
        {"$class": "builtins.print"},
        {"__reduce__": 1, "$tuple": []},
    ],
)
def test_there_is_no_tag_that_makes_objects_of_a_named_class(tree):
    if len(tree) > 1:
        assert decode_item(tree, {}.get) == {"__reduce__": 1, "$tuple": []}
    else:
        with pytest.raises(EntryDamagedError, match="unknown type"):
            decode_item(tree, {}.get)


_WATCHED = """
    import collections, json, pathlib, sys
    from tests.hostile import mutations as m, trial as t
    folder = pathlib.Path(sys.argv[1]).resolve()
    trial = t.Trial(folder)
    for attack in t.FORGERIES:  # what is imported when it is first needed is imported now
        for seed in range(25):
            t.attempt(trial, attack, m.SeededDice(10**6 + seed))
    watching, events, outside = False, collections.Counter(), []
    HARMLESS = {"object.__getattr__", "marshal.dumps", "array.__new__"}
    def hook(event, args):
        if not watching or event in HARMLESS:
            return
        events[event] += 1
        if event == "open":
            path = pathlib.Path(str(args[0]))
            step = len(path.parts) == 1 and path.name not in ("", "..")  # relative to a directory that is open already
            if not step and not path.absolute().is_relative_to(folder):
                outside.append(str(path))
    sys.addaudithook(hook)
    for seed in range(int(sys.argv[2])):
        dice = m.SeededDice(seed)
        trial.write(m.one_of(dice, t.FORGERIES)(trial, dice))
        trial.cache.close()
        modules = set(sys.modules)
        watching = True
        trial.cache.get(t.KEY, None)
        watching = False
        assert set(sys.modules) == modules, set(sys.modules) - modules
    print(json.dumps([events, outside]))
"""


def test_reading_a_forged_entry_opens_its_files_and_does_nothing_else_that_python_audits(tmp_path):
    verdict = run(_WATCHED, tmp_path, N_WATCHED, memory=6144 * MIB, timeout=120)
    assert verdict.how == "ended", verdict.err[-3000:]
    events, outside = json.loads(verdict.out)
    assert outside == []
    assert set(events) == {"open"}
    assert events["open"] > N_WATCHED


@pytest.mark.parametrize("dtype", ["<U1", ">U1", "<U2"])
@pytest.mark.parametrize("tag", ["$npscalar", "$ndarray"])
def test_strings_of_what_are_no_characters_are_damage(dtype, tag):
    """Found by `make fuzz`: Python raises SystemError when it makes a string of them."""
    for point in (0x110000, 0x7FFFFFFF, 0xFFFFFFFF):
        array = np.full(int(dtype[2:]), point, dtype[0] + "u4")
        node = {"dtype": dtype, "shape": [], "base64": base64.b64encode(array.tobytes()).decode()}
        with pytest.raises(EntryDamagedError, match="no characters of Unicode"):
            decode_item({tag: node}, {}.get)
        with pytest.raises(UnstorableError, match="no characters of Unicode"):
            encode_item({"x": array.view(dtype)})
    fine = np.array(["\U0010ffff\ud800"[: int(dtype[2:])]], dtype)
    assert decode_item(encode_item(fine).tree, {}.get).tobytes() == fine.tobytes()
