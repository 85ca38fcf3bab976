"""The bounded mapping: what was used least recently goes first."""

from __future__ import annotations

from zcache.storage.recent import Recent


def test_the_least_recently_used_goes_first():
    recent = Recent(3, 1000)
    for name in "abc":
        recent.put(name, name.upper(), 1)
    assert recent.get("a") == "A"
    recent.put("d", "D", 1)
    assert [recent.get(name) for name in "abcd"] == ["A", None, "C", "D"]


def test_weights_bound_it_too_but_one_value_always_stays():
    recent = Recent(10, 10)
    recent.put("a", 1, 6)
    recent.put("b", 2, 5)
    assert (recent.get("a"), recent.get("b")) == (None, 2)
    recent.put("c", 3, 99)
    assert (recent.get("b"), recent.get("c")) == (None, 3)


def test_a_value_that_is_put_again_weighs_once():
    recent = Recent(10, 10)
    for _ in range(5):
        recent.put("a", 1, 6)
    recent.put("b", 2, 4)
    assert (recent.get("a"), recent.get("b")) == (1, 2)


def test_values_are_dropped_by_their_keys():
    recent = Recent(10, 10)
    for n in range(6):
        recent.put(n, n, 1)
    recent.drop(lambda n: n % 2 == 0)
    assert [recent.get(n) for n in range(6)] == [None, 1, None, 3, None, 5]
    recent.put(9, 9, 7)
    assert recent.get(1) == 1  # the weights of those that went do not count
