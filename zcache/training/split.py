"""Where a pipeline is split: the deterministic beginning is cached, the rest runs on every access."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
from monai.transforms import (
    Compose,
    InvertibleTransform,
    OneOf,
    Randomizable,
    RandomizableTrait,
    RandomOrder,
    SomeOf,
    Transform,
)

__all__ = ["Uncached", "UncachedInvertible", "first_random", "uncached", "unfolded"]


class Uncached(Randomizable, Transform):  # type: ignore[misc]
    """A transform that runs on every access, whatever it is; see `uncached`."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, data: Any) -> Any:
        """Apply the wrapped transform."""
        return self.transform(data)

    def randomize(self, data: Any = None) -> None:
        """Draw nothing: the wrapped transform draws when it is called."""

    def set_random_state(self, seed: int | None = None, state: np.random.RandomState | None = None) -> Self:
        """Seed the wrapped transform, if it can be seeded."""
        if isinstance(self.transform, Randomizable):
            self.transform.set_random_state(seed, state)
        return self


class UncachedInvertible(Uncached, InvertibleTransform):  # type: ignore[misc]
    """An `Uncached` transform that can be inverted."""

    def inverse(self, data: Any) -> Any:
        """Invert the wrapped transform."""
        return self.transform.inverse(data)  # type: ignore[attr-defined]


def uncached(transform: Callable[[Any], Any]) -> Uncached:
    """Keep a transform, and all that follow it, out of the cached part of a pipeline.

    For a transform whose randomness MONAI cannot see: a ``Lambdad`` that draws numbers, a transform that reads a clock.
    What it returned the first time would otherwise be served for ever.

    Parameters
    ----------
    transform : callable
        A transform or a plain function.

    Returns
    -------
    Uncached
        A random transform, as MONAI sees it, that applies the one given; it can be inverted if that one can.

    Examples
    --------
    >>> import random
    >>> from monai.transforms import Compose, Lambdad
    >>> pipeline = Compose([uncached(Lambdad("image", lambda x: x + random.random()))])
    >>> first_random(pipeline)
    0
    """
    return UncachedInvertible(transform) if isinstance(transform, InvertibleTransform) else Uncached(transform)


def first_random(pipeline: Compose) -> int | None:
    """Return the index of the first transform that must run on every access, None if all can be cached.

    As in MONAI: the first that is `RandomizableTrait`, or that is not a `Transform` (a plain function may do anything).
    MONAI counts any nested ``Compose`` as random; here one that holds deterministic transforms alone can be cached.
    A pipeline that chooses among its transforms, or their order, cannot be split at all.
    """
    if isinstance(pipeline, OneOf | RandomOrder | SomeOf):
        return 0
    index: int | None = pipeline.get_index_of_first(lambda t: not _is_deterministic(t))
    return index


def unfolded(transforms: Iterable[Any]) -> list[Any]:
    """Return the transforms with those of nested ``Compose`` objects in their place.

    Unlike ``Compose.flatten``, this makes no new ``Compose``, which would seed its transforms anew.
    """
    return [leaf for t in transforms for leaf in (unfolded(t.transforms) if type(t) is Compose else [t])]


def _is_deterministic(transform: Any) -> bool:
    if type(transform) is Compose:
        return all(_is_deterministic(t) for t in transform.transforms)
    return isinstance(transform, Transform) and not isinstance(transform, RandomizableTrait)
