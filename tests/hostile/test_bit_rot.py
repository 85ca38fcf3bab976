"""Bit rot: whatever an accident does to any file of an entry, the item is right to the last bit, or a counted miss."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile import mutations as m
from tests.hostile.trial import Outcome, Trial, WrongReadError, attempt, rot

N_MUTATIONS = 300
HEAL_EACH = 50


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    return Trial(tmp_path_factory.mktemp("rot"))


@pytest.mark.parametrize("damage", m.DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_never_read_and_the_next_put_heals(trial, damage, tally):
    dice = m.SeededDice(m.DAMAGES.index(damage))
    read = sorted(n for n in trial.originals if n == "zarr.json" or not n.endswith("zarr.json"))
    for i in range(N_MUTATIONS):
        name = read[i % len(read)]
        broken = bytearray(trial.originals[name])
        damage(broken, dice)
        trial.write({name: bytes(broken)})
        outcome = trial.read()
        same = bytes(broken) == trial.originals[name]
        assert outcome is (Outcome.RIGHT if same else Outcome.MISS), (name, i)
        tally[f"damaged files: {outcome.value}"] += 1
        if outcome is Outcome.MISS and i % HEAL_EACH == 0:
            trial.assert_healed()
            tally["entries healed"] += 1
            trial.adopt()


def test_damage_to_the_documents_that_other_readers_use_changes_nothing(trial, tally):
    dice = m.SeededDice(1)
    for_others = sorted(n for n in trial.originals if n.endswith("/zarr.json"))
    assert len(for_others) == 8
    for i in range(120):
        name = for_others[i % len(for_others)]
        trial.write({name: m.damaged(trial.originals[name], dice)})
        assert trial.read() is Outcome.RIGHT
        tally["damaged files: right bits"] += 1
    trial.write({})
    original = trial.root_document.read_bytes()
    for data in (b"", b"\0" * 50, original[:-1], b"[" * 9999):
        trial.root_document.write_bytes(data)
        assert trial.read() is Outcome.RIGHT
    trial.root_document.write_bytes(original)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_any_bytes_is_noticed(trial, tally, data):
    """Chosen by hypothesis, which shrinks what fails to the least change."""
    name = data.draw(st.sampled_from(sorted(n for n in trial.originals if not n.endswith("/zarr.json"))))
    original = trial.originals[name]
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 40)))
    broken = original[:start] + data.draw(st.binary(max_size=40)) + original[end:]
    trial.write({name: broken})
    outcome = trial.read()
    assert outcome is (Outcome.RIGHT if broken == original else Outcome.MISS)
    tally[f"damaged files: {outcome.value}"] += 1


def test_files_that_changed_places_are_noticed(trial):
    """A restore from a backup, or a repair of the file system, that mixed files up."""
    names = sorted(trial.originals)
    for a in names:
        for b in names:
            if a != b and not a.endswith("/zarr.json"):
                trial.write({a: trial.originals[b]})
                assert trial.read() is Outcome.MISS, (a, b)
    trial.write({})
    assert trial.read() is Outcome.RIGHT


def test_missing_and_misplaced_directories_are_misses_that_heal(tmp_path):
    trial = Trial(tmp_path)

    def remove(name):
        return lambda: shutil.rmtree(trial.entry / name) if (trial.entry / name).is_dir() else _unlink(name)

    def _unlink(name):
        (trial.entry / name).unlink()

    def misplace(a, b):
        return lambda: (trial.entry / a).rename(trial.entry / b)

    accidents = [
        remove("noise"),
        remove("labels/label/0/c"),
        remove("labels"),
        remove("few/c/0/0/0/0"),
        misplace("whole/c", "whole/d"),
        misplace("many/c/0/0", "many/c/0/1"),
        misplace("mask", "noise/mask"),
    ]
    for accident in accidents:
        accident()
        assert trial.read() is Outcome.MISS
        trial.assert_healed()
        trial.adopt()


def test_a_mutation_that_were_read_would_be_reported(trial, monkeypatch):
    """The judge itself: another item, read from an entry with right checksums, is called wrong if it was rot."""

    def swap(trial_, dice):
        forged = trial_.forged
        stream = forged.shards["noise"].streams
        first = stream[0]
        stream[0] = stream[1]
        files = forged.files()
        stream[0] = first
        forged.files()
        return files

    monkeypatch.setattr("tests.hostile.trial.DAMAGE", (swap,))
    with pytest.raises(WrongReadError, match="swap was read as another item"):
        attempt(trial, swap, m.SeededDice(0))
    trial.write({})
    assert attempt(trial, rot, m.SeededDice(0)) in (Outcome.MISS, Outcome.RIGHT)
