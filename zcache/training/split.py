"""Where a pipeline is split: the deterministic beginning is cached, the rest runs on every access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monai.transforms import Compose, RandomizableTrait, Transform

__all__ = ["Uncached", "first_random", "uncached"]


class Uncached(Transform, RandomizableTrait):  # type: ignore[misc]
    """A transform that runs on every access, whatever it is; see `uncached`."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, data: Any) -> Any:
        """Apply the wrapped transform."""
        return self.transform(data)


def uncached(transform: Callable[[Any], Any]) -> Uncached:
    """Keep a transform, and all that follow it, out of the cached part of a pipeline.

    For a transform whose randomness MONAI cannot see: a ``Lambdad`` that draws numbers, a transform that reads a clock.
    What it returned the first time would otherwise be served for ever.

    Parameters
    ----------
    transform : callable
        A transform or a plain function.

    Examples
    --------
    >>> import random
    >>> from monai.transforms import Compose, Lambdad
    >>> pipeline = Compose([uncached(Lambdad("image", lambda x: x + random.random()))])
    >>> first_random(pipeline)
    0
    """
    return Uncached(transform)


def first_random(pipeline: Compose) -> int | None:
    """Return the index of the first transform that must run on every access, None if all can be cached.

    As in MONAI: the first that is `RandomizableTrait`, or that is not a `Transform` (a plain function may do anything).
    MONAI counts any nested ``Compose`` as random; here one that holds deterministic transforms alone can be cached.
    """
    index: int | None = pipeline.get_index_of_first(lambda t: not _is_deterministic(t))
    return index


def _is_deterministic(transform: Any) -> bool:
    if type(transform) is Compose:
        return all(_is_deterministic(t) for t in transform.transforms)
    return isinstance(transform, Transform) and not isinstance(transform, RandomizableTrait)
