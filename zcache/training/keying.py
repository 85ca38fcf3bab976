"""Keys of a data set's items: what they are made of, when it is looked at again, and what is told of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from monai.transforms import Compose

from zcache.errors import CacheConfigError, FingerprintError
from zcache.keys import (
    Json,
    describe,
    digest,
    fingerprint,
    ingredients,
    item_fingerprint,
    pack,
    source_paths,
    source_stamps,
    switches,
    trace,
    version,
)
from zcache.training.split import unfolded

__all__ = ["HashFunc", "Keying", "Pipeline"]

HashFunc = Callable[..., bytes]
_ALWAYS = ("monai", "numpy", "torch")


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The cached transforms as keys see them.

    Attributes
    ----------
    form : Json
        Their fingerprint.
    digest : str
        Of the fingerprint.
    versions : mapping of str to str
        The versions of the libraries that they come from.
    variables : mapping of str to str or None
        The environment variables that they read, and their values.
    paths : mapping of str to tuple
        The files that they name, and which version of each was there.
    remarks : tuple of str
        What could not be followed.
    """

    form: Json
    digest: str
    versions: Mapping[str, str]
    variables: Mapping[str, str | None]
    paths: Mapping[str, tuple[int, int] | None]
    remarks: tuple[str, ...]

    def is_current(self) -> bool:
        """Whether the environment variables and files are what they were."""
        return all(os.environ.get(name) == value for name, value in self.variables.items()) and all(
            _version_of(path) == seen for path, seen in self.paths.items()
        )


@dataclass(eq=False)
class Keying:
    """How the keys of a data set are made.

    Parameters
    ----------
    hash_func, hash_transform : callable or None
        In place of the fingerprints of an item, and of the cached transforms.
    root : str or None
        The folder that paths are told relative to.
    check_sources : bool
        Whether size and modification time of files count.
    version_in_key : bool
        Whether the versions of the libraries count that the cached transforms come from.
    precision : str
        What non-integral floats may lose.
    """

    hash_func: HashFunc | None
    hash_transform: HashFunc | None
    root: str | None
    check_sources: bool
    version_in_key: bool
    precision: str

    def __post_init__(self) -> None:
        if self.root is not None and not os.path.isdir(self.root):  # noqa: PTH112 - any PathLike
            raise CacheConfigError(f"root={self.root!r} is not a directory: give the one that the paths of data lie in")
        for name in ("hash_func", "hash_transform"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise CacheConfigError(f"{name}={function!r} is not a function of an item to bytes")
        # A transform may note things down while it runs. What differs before and after that does not count; what
        # differs between the end of one run and the beginning of the next was changed by somebody else.
        self._settled: str | None = None
        self._running: set[tuple[int, int]] = set()

    def pipeline(self, transform: Compose, count: int, **composed: Any) -> Pipeline:
        """Take the fingerprint of the first transforms of a pipeline.

        Raises
        ------
        FingerprintError
            No stable key can be made from one of them.
        """
        transforms = list(transform.transforms[:count])
        hashed = self._hashed(transforms)
        names = ("map_items", "unpack_items", "lazy", "overrides")
        how = {name: getattr(transform, name) for name in names} | composed
        found = trace(transforms if hashed is None else hashed, root=self.root, check_sources=self.check_sources)
        form = {"transforms": found.form, "composed": fingerprint(how)}
        versions = {name: version(name) for name in sorted({*_ALWAYS, *found.libraries} - {"zcache"})}
        self._settled = digest(form)
        return Pipeline(
            form,
            self._settled,
            {name: known for name, known in versions.items() if known is not None},
            {name: os.environ.get(name) for name in found.variables},
            {path: _version_of(path) for path in found.paths},
            found.remarks,
        )

    def retaken(self, known: Pipeline, transform: Compose, count: int, **composed: Any) -> Pipeline:
        """Look at the transforms again before they run: what was changed since counts as it is now.

        Raises
        ------
        FingerprintError
            They hold something now that no key can be made from.
        """
        settled = self._settled
        if settled is None or self.hash_transform is not None or self._is_running():
            return known
        fresh = self.pipeline(transform, count, **composed)
        return known if fresh.digest == settled else fresh

    @contextmanager
    def running(self, transform: Compose, count: int, **composed: Any) -> Iterator[None]:
        """Let the transforms run: what they note down meanwhile does not count."""
        me = (os.getpid(), threading.get_ident())
        self._running.add(me)
        try:
            yield
        finally:
            self._running.discard(me)
        if self.hash_transform is None and not self._is_running():
            try:
                self.pipeline(transform, count, **composed)
            except FingerprintError:  # a model was loaded, a file opened: nothing can be compared from now on
                self._settled = None

    def _is_running(self) -> bool:
        """Whether another thread runs the transforms; those of the process that forked this one do not count."""
        return any(pid == os.getpid() for pid, _ in self._running)

    def parts(self, item: Any, pipeline: Pipeline) -> dict[str, Json]:
        """Return what the key of an item is made of.

        Raises
        ------
        FingerprintError
            No stable key can be made from the item.
        """
        if self.hash_func is None:
            own = item_fingerprint(item, root=self.root, check_sources=self.check_sources)
        else:
            stamps = item_fingerprint(list(source_paths(item)), root=self.root) if self.check_sources else None
            own = ["hash_func", self.hash_func(item).hex(), stamps]
        return ingredients(
            item=own,
            pipeline=pipeline.digest,
            precision=self.precision,
            switches=switches(),
            versions=pipeline.versions if self.version_in_key else {},
        )

    def about(
        self, item: Any, pipeline: Pipeline, parts: Mapping[str, Json], transforms: Sequence[Any]
    ) -> dict[str, Any]:
        """Return what an entry says of itself: sources, steps, versions, and what its key is made of."""
        stamps = {"sources": source_stamps(item, root=self.root)} if self.check_sources else {}
        packed = pack({**parts, "pipeline": pipeline.form})
        told = {} if packed is None else {"ingredients": packed}
        shown = {"source": list(source_paths(item)), **stamps, "pipeline": describe(transforms)}
        return {**shown, "versions": dict(pipeline.versions), **told}

    def _hashed(self, transforms: list[Any]) -> str | None:
        """Return what `hash_transform` makes of the transforms, None if it is not given or cannot hash them."""
        if self.hash_transform is None:
            return None
        try:
            return self.hash_transform(unfolded(transforms)).hex()
        except TypeError as e:
            if "JSON serializable" not in str(e):
                raise
            return None  # json_hashing: MONAI would hash the names of the classes alone


def _version_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - text
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
