"""Drop-in replacement for MONAI's `CacheNTransDataset`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.serialization import DEFAULT_PROTOCOL

from zcache.errors import CacheConfigError
from zcache.training.dataset import DEFAULT_DIR, CacheDir, HashFunc, PersistentDataset

__all__ = ["CacheNTransDataset"]


class CacheNTransDataset(PersistentDataset):
    """A `PersistentDataset` that caches the result of the first `cache_n_trans` transforms, random or not.

    Parameters
    ----------
    data : sequence
        Items to load and transform.
    transform : callable or sequence of callable or None
        The pipeline.
    cache_n_trans : int
        How many transforms, from the first, are cached. Random ones among them are frozen at what they first drew.
    cache_dir : path or None, optional
        As of `PersistentDataset`.
    hash_func : callable, optional
        As of `PersistentDataset`.
    pickle_module : str
        Without effect.
    pickle_protocol : int
        Without effect.
    hash_transform : callable, optional
        As of `PersistentDataset`.
    reset_ops_id : bool
        As of `PersistentDataset`.
    **kwargs : object
        The other arguments of `PersistentDataset`, by keyword.

    Raises
    ------
    CacheConfigError
        `cache_n_trans` is negative or larger than the number of transforms.

    Examples
    --------
    >>> from monai.transforms import Lambdad
    >>> ds = CacheNTransDataset([{"x": 1}], [Lambdad("x", lambda x: x + 1)] * 3, 2, cache_dir=None)
    >>> ds[0]
    {'x': 4}
    """

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any] | None,
        cache_n_trans: int,
        cache_dir: CacheDir = DEFAULT_DIR,
        hash_func: HashFunc | None = None,
        pickle_module: str = "pickle",
        pickle_protocol: int = DEFAULT_PROTOCOL,
        hash_transform: HashFunc | None = None,
        reset_ops_id: bool = True,
        **kwargs: Any,
    ) -> None:
        self.cache_n_trans = cache_n_trans
        super().__init__(
            data,
            transform,
            cache_dir,
            hash_func,
            pickle_module,
            pickle_protocol,
            hash_transform,
            reset_ops_id,
            **kwargs,
        )

    def _cached_count(self) -> int:
        n_transforms = len(self.transform.transforms)
        if not 0 <= self.cache_n_trans <= n_transforms:
            raise CacheConfigError(
                f"cache_n_trans={self.cache_n_trans} does not fit a pipeline of {n_transforms} transforms: "
                f"choose 0 to {n_transforms}"
            )
        return self.cache_n_trans

    def _why_nothing(self) -> str:
        return "cache_n_trans=0: nothing is cached, every access computes everything"
