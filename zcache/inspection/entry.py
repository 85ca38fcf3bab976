"""One entry of a cache that is looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zcache.encoding.array_layout import array_parts
from zcache.encoding.chunking import Region
from zcache.encoding.payload import Json, decode_item
from zcache.encoding.places import ArrayPlace, array_places
from zcache.encoding.plain import BFLOAT16, plain_item, widened
from zcache.errors import EntryDamagedError, EntryNotFoundError
from zcache.inspection import display, extras
from zcache.inspection.listing import EntryInfo, survey
from zcache.inspection.pipelines import Pipelines
from zcache.inspection.values import scalars
from zcache.storage.entry import OpenEntries, StoredEntry
from zcache.storage.store import Store
from zcache.storage.threads import ReadThreads

if TYPE_CHECKING:
    import zarr
    from matplotlib.figure import Figure

    from zcache.inspection.plot import Layout
    from zcache.inspection.viewer import Viewer
    from zcache.inspection.windows import Window

__all__ = ["EntryView", "Opened"]

T = TypeVar("T")

_MANY = 32  # entries from which on threads pay
_THREADS = 4


class Opened:
    """What all views of one cache share."""

    def __init__(self, store: Store, foreign: tuple[str, ...]) -> None:
        self.store = store
        self.foreign = foreign
        self.pipelines = Pipelines()
        self.entries = OpenEntries(store, ReadThreads())
        self.infos: dict[str, EntryInfo] = {}

    def info(self, key: str) -> EntryInfo:
        """Return what a list shows of an entry, looked up once."""
        found = self.infos.get(key)
        if found is None:
            found = self.infos[key] = survey(self.store, key, self.pipelines)
        return found

    def look_up(self, keys: Sequence[str]) -> list[EntryInfo]:
        """Return what a list shows of many entries, several at a time: on a network each answer is waited for."""
        if len(keys) < _MANY:
            return [self.info(key) for key in keys]
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(self.info, keys))


class EntryView:
    """One entry, read when it is asked for. Made by `CacheView`."""

    def __init__(self, opened: Opened, key: str) -> None:
        self._opened = opened
        self.key = key

    @property
    def info(self) -> EntryInfo:
        """What a list shows: shapes, types, sizes, source, age, pipeline, and whether it is sound."""
        return self._opened.info(self.key)

    @property
    def path(self) -> Path:
        """The Zarr group."""
        return self._opened.store.entry_path(self.key)

    @property
    def pipeline(self) -> list[str]:
        """The transforms that made it, with their parameters."""
        return [str(step) for step in self.info.pipeline.steps] if self.info.pipeline else []

    @property
    def places(self) -> list[ArrayPlace]:
        """Every array of the item, those within the document too."""
        return self._using(lambda entry: array_places(entry.tree))

    @property
    def scalars(self) -> dict[str, str]:
        """The values of the item that are no arrays, as text."""
        return self._using(lambda entry: scalars(entry.tree))

    @property
    def arrays(self) -> dict[str, zarr.Array[Any]]:
        """The arrays as they are stored, for Zarr tools: codes, not yet values."""
        import zarr  # noqa: PLC0415 - takes half a second

        records = self._using(lambda entry: entry.record.arrays)
        group = zarr.open_group(str(self.path), mode="r")
        places = {name: array_parts(name, is_label=record.is_label) for name, record in records.items()}
        found = {name: group["/".join(parts)] for name, parts in places.items()}
        return {name: array for name, array in found.items() if isinstance(array, zarr.Array)}

    @property
    def meta(self) -> dict[str, dict[str, Any]]:
        """Metadata of each MetaTensor, by its place: affine, what the reader found, ``applied_operations``."""

        def read(entry: StoredEntry) -> dict[str, dict[str, Any]]:
            found = {}
            for place in array_places(entry.tree):
                if place.kind == "metatensor":
                    parts = {"meta": place.node["meta"], "done": place.node["applied_operations"]}
                    decoded = plain_item(parts, entry.read)
                    own = decoded["meta"] if isinstance(decoded["meta"], dict) else {}
                    found[place.place] = {**own, "applied_operations": decoded["done"]}
            return found

        return self._using(read)

    def read(self, name: str, region: Sequence[slice | tuple[int, int]] | None = None) -> np.ndarray:
        """Read an array or a box of it, as it was computed, every bit (bfloat16 as float32, which holds its values).

        Parameters
        ----------
        name : str
            Of the array.
        region : sequence of slice or (start, stop), optional
            Along the first axes; only the chunks that overlap are read.

        Raises
        ------
        EntryNotFoundError
            The entry is gone, or has no such array.
        EntryDamagedError
            The entry is damaged.
        IndexError
            The region does not lie inside the array.
        """

        def read(entry: StoredEntry) -> np.ndarray:
            places = array_places(entry.tree)
            place = next((p for p in places if name in (p.name, p.place)), None)
            if place is None and name not in entry.record.arrays:
                known = dict.fromkeys([*(p.place for p in places), *entry.record.arrays])
                raise EntryNotFoundError(f"the entry {self.key} has no array {name!r}: it has {_listed(known)}")
            if place is None or (place.name and place.is_plain):
                stored = place.name if place else name
                return entry.read(stored, _box(region, entry.describe(stored)[0]))
            if place.name and place.dtype == BFLOAT16:
                return widened(entry.read(place.name, _box(region, place.shape)))
            array: np.ndarray = plain_item({f"${place.kind}": place.node}, entry.read)
            box = _box(region, array.shape)
            return array if box is None else array[tuple(slice(a, b) for a, b in box)].copy()

        return self._using(read)

    def load(self, *, torch: bool = False) -> Any:
        """Return the whole item.

        Parameters
        ----------
        torch : bool
            With tensors and MetaTensors as the training sees them, for which torch and MONAI are imported. Without,
            numpy arrays are in their places, and enums are their values.
        """
        if not torch:
            return self._using(lambda entry: plain_item(entry.tree, entry.read))
        from zcache.training.leaves import torch_leaf_codecs  # noqa: PLC0415 - the only way to torch from here

        return self._using(lambda entry: decode_item(entry.tree, entry.read, torch_leaf_codecs()))

    def plot(
        self,
        image: str | None = None,
        label: str | bool | None = None,
        *,
        channel: int = 0,
        window: Window = None,
        layout: Layout = "planes",
    ) -> Figure:
        """Draw slices the right way up and in true proportions, their histogram, and the classes of the label.

        Parameters
        ----------
        image : str, optional
            Which array; the largest that is not called a label if left out.
        label : str or bool, optional
            What is drawn over it; the array of the same extents that is called a label if left out, nothing if False.
        channel : int
            Which channel or point in time.
        window : (low, high) or str, optional
            What is black and white, in the units of the values; or, of CT in Hounsfield units, ``"brain"``,
            ``"soft tissue"``, ``"lung"`` or ``"bone"``. Left out: the 1st and 99th percentile of the slices.
        layout : str
            ``"planes"``: the middle sagittal, coronal and axial slice; ``"mosaic"``: up to 24 slices of one view, the
            one that the volume was taken in if its slices are thick, else axial.

        Returns
        -------
        matplotlib.figure.Figure
            The numbers at slices are indices into the array. The histogram is that of the slices drawn; what the
            classes of the label measure is counted in the whole of it.

        Raises
        ------
        MissingExtraError
            Matplotlib is not installed.
        EntryNotFoundError
            There is no such array.
        CacheConfigError
            The channel, window, layout or label does not fit the array.
        """
        return extras.load("plot").draw(self, image, label, channel, window, layout)  # type: ignore[no-any-return]

    def view(
        self,
        image: str | None = None,
        label: str | bool | None = None,
        *,
        channel: int = 0,
        window: Window = None,
        viewer: Viewer | None = None,
    ) -> Any:
        """Show the volume in a notebook, to click and scroll through.

        Parameters
        ----------
        image, label, channel, window
            As of `plot`. The label is taken to have the voxels of the image.
        viewer : str, optional
            ``"niivue"``: NiiVue, which draws with the browser's WebGL and is handed the whole arrays; needs ipyniivue.
            ``"slices"``: three slices with sliders, read when they are asked for; needs ipywidgets. Left out: NiiVue
            for volumes where it is installed, else slices.

        Returns
        -------
        ipyniivue.NiiVue or ipywidgets.VBox
            A widget, which a notebook shows if it is the last value of a cell.

        Raises
        ------
        MissingExtraError
            Neither is installed.
        EntryNotFoundError, CacheConfigError
            As of `plot`.
        """
        return extras.load("viewer").view(self, image, label, channel, window, viewer)

    def to_nifti(self, path: str | os.PathLike[str], name: str | None = None) -> Path:
        """Write an array as NIfTI, with its affine.

        Parameters
        ----------
        path : path
            Ends in ``.nii`` or ``.nii.gz``.
        name : str, optional
            Which array; the largest that is not called a label if left out.

        Raises
        ------
        MissingExtraError
            Nibabel is not installed.
        """
        return extras.load("nifti").export(self, Path(path), name)  # type: ignore[no-any-return]

    def to_json(self) -> Json:
        """Return what a list shows, as JSON."""
        return display.entry_json(self.info)

    def __repr__(self) -> str:
        return display.entry_text(self)

    def _repr_html_(self) -> str:
        return display.entry_html(self)

    def __rich__(self) -> Any:
        from zcache.inspection import rich_tables  # noqa: PLC0415 - rich takes longer to import than all of this

        return rich_tables.entry(self)

    def _using(self, read: Callable[[StoredEntry], T]) -> T:
        entries = self._opened.entries
        kept = False
        try:
            entry, kept = entries.open(self.key)
            return read(entry)
        except FileNotFoundError:
            entries.forget(self.key)
            raise EntryNotFoundError(f"the entry {self.key} was removed from {self._opened.store.root}") from None
        except EntryDamagedError:
            entries.forget(self.key)
            if kept:  # another process may have replaced it since it was opened
                return self._using(read)
            raise


def _box(region: Sequence[slice | tuple[int, int]] | None, shape: tuple[int, ...]) -> Region | None:
    if region is None:
        return None
    parts = list(region)
    if len(parts) > len(shape):
        raise IndexError(f"the region has {len(parts)} axes, the array {len(shape)}")
    box = []
    for part, n in zip(parts, shape, strict=False):
        if not isinstance(part, slice):
            box.append((int(part[0]), int(part[1])))
        elif part.step in (None, 1):
            start, stop, _ = part.indices(n)
            box.append((start, max(start, stop)))
        else:
            raise IndexError("a region has no steps: read the box, then take every n-th voxel of it")
    return (*box, *((0, n) for n in shape[len(box) :]))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
