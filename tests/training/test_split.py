from __future__ import annotations

import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    Flip,
    Identity,
    Lambda,
    OneOf,
    RandAdjustContrast,
    RandFlip,
    RandFlipd,
    RandomizableTrait,
    RandomOrder,
    ScaleIntensity,
    SomeOf,
    Transform,
)

from zcache import uncached
from zcache.training.split import Uncached, first_random


def plain_function(x):
    return x


@pytest.mark.parametrize(
    ("steps", "index"),
    [
        ([], None),
        ([Identity(), Flip(0)], None),
        ([Identity(), RandFlip(), Flip(0)], 1),
        ([RandFlip()], 0),
        ([Identity(), plain_function], 1),
        ([plain_function, Identity()], 0),
        ([Identity(), Lambda(plain_function), RandAdjustContrast()], 2),
        ([Identity(), uncached(Flip(0)), Identity()], 1),
        ([Compose([Identity(), Compose([Flip(0)])]), RandFlip()], 1),
        ([Compose([Identity(), RandFlip()]), Identity()], 0),
        ([Identity(), Compose([Identity(), Compose([plain_function])])], 1),
        ([Identity(), OneOf([Identity(), Flip(0)])], 1),
        ([Identity(), SomeOf([Identity(), Flip(0)])], 1),
        ([Identity(), RandomOrder([Identity(), Flip(0)])], 1),
    ],
)
def test_the_split_is_before_the_first_that_must_run_each_time(steps, index):
    assert first_random(Compose(steps)) == index


def test_a_flat_pipeline_is_split_where_monai_splits_it():
    for steps in (
        [Identity(), RandFlip()],
        [Identity(), plain_function],
        [Identity()],
        [EnsureChannelFirst(), ScaleIntensity()],
    ):
        pipeline = Compose(steps)
        theirs = pipeline.get_index_of_first(lambda t: isinstance(t, RandomizableTrait) or not isinstance(t, Transform))
        assert first_random(pipeline) == theirs


@pytest.mark.parametrize("kind", [OneOf, SomeOf, RandomOrder])
def test_a_pipeline_that_chooses_is_never_split(kind):
    assert first_random(kind([Identity(), Flip(0)])) == 0


def test_uncached_applies_what_it_wraps():
    marked = uncached(Flip(0))
    assert isinstance(marked, Uncached)
    image = MetaTensor(torch.arange(6.0).reshape(1, 2, 3))
    assert torch.equal(marked(image), Flip(0)(image))
    assert uncached(plain_function)(3) == 3


def test_case_33_an_uncached_random_transform_is_seeded_and_inverted_through_the_marker():
    flip = RandFlipd("x", prob=0.5, spatial_axis=0)
    plain = Compose([RandFlipd("x", prob=0.5, spatial_axis=0)])
    marked = Compose([uncached(flip)])
    plain.transforms[0].set_random_state(7)
    marked.transforms[0].set_random_state(7)
    image = MetaTensor(torch.arange(4.0)[None])
    drawn = [(plain({"x": image})["x"], marked({"x": image})["x"]) for _ in range(8)]
    assert all(torch.equal(a, b) for a, b in drawn)
    assert len({tuple(b.flatten().tolist()) for _, b in drawn}) == 2
    assert all(torch.equal(marked.inverse({"x": b})["x"], image) for _, b in drawn)
