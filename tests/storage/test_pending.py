from __future__ import annotations

import numpy as np
import pytest

from zcache.encoding.narrowing import LOSSLESS, Precision
from zcache.encoding.payload import encode_item
from zcache.storage.pending import PendingItem


def floats(n=5000):
    return np.random.default_rng(3).random(n, dtype="f4") * 2 - 1


def test_what_is_read_is_private_to_each_reader():
    image = floats()
    pending = PendingItem.snapshot(encode_item({"image": image}), LOSSLESS, {})
    first = pending.read("image")
    first[:] = 0
    np.testing.assert_array_equal(pending.read("image"), image)
    assert pending.nbytes == image.nbytes


@pytest.mark.parametrize("policy", ["lossless", 1e-3, "float16", "uint8", "uint16"])
def test_a_miss_returns_what_a_hit_will(policy):
    image = floats()
    image[:3] = [-0.0, np.nan, np.inf]
    label = np.repeat(np.arange(7.0, dtype="f4"), 900)
    original = {"image": image.copy(), "label": label.copy()}
    encoded = encode_item(original)
    pending = PendingItem.snapshot(encoded, Precision.parse(policy), {})
    read = pending.read_in(encoded)
    for name in ("image", "label"):
        assert read(name).tobytes() == pending.read(name).tobytes()
    assert read("label").tobytes() == label.tobytes()
    assert (read("image").tobytes() == image.tobytes()) == (policy == "lossless")


def test_exact_arrays_are_given_away_and_rounded_ones_are_not():
    image, label = floats(), np.zeros(9000, "f4")
    encoded = encode_item({"image": image, "label": label})
    read = PendingItem.snapshot(encoded, Precision.parse(1e-3), {}).read_in(encoded)
    assert np.shares_memory(read("label"), label)
    assert not np.shares_memory(read("image"), image)
