"""Crop push-down: of an entry, only the boxes are read that the pipeline's random crop keeps.

The crop itself decides where: MONAI's own transform runs on stand-ins, tensors on torch's ``meta`` device that have the
cached shape, affine and trace but no memory. It draws from its own random state and updates affine and trace itself;
what it returns are views of the stand-ins, whose offset and shape are the boxes. Whatever is not such a view is read
whole, with the random state put back, so that the result is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    RandCropByLabelClasses,
    RandCropByLabelClassesd,
    RandCropByPosNegLabel,
    RandCropByPosNegLabeld,
    Randomizable,
    RandScaleCrop,
    RandScaleCropd,
    RandSpatialCrop,
    RandSpatialCropd,
    RandSpatialCropSamples,
    RandSpatialCropSamplesd,
    RandWeightedCrop,
    RandWeightedCropd,
    apply_transform,
)

from zcache.encoding.chunking import Region
from zcache.encoding.payload import Decoder, Json, decode_item
from zcache.encoding.voxels import VoxelQuery
from zcache.errors import EntryDamagedError
from zcache.storage.entry import Entry
from zcache.training.leaves import decode_tensor, torch_leaf_codecs, with_dtype
from zcache.training.select import voxel_query, with_indices

__all__ = ["CropPushdown", "WholeItem", "find_crop"]

_DICTIONARY = (
    RandSpatialCropd,
    RandScaleCropd,
    RandSpatialCropSamplesd,
    RandCropByPosNegLabeld,
    RandCropByLabelClassesd,
    RandWeightedCropd,
)
_ARRAY = (
    RandSpatialCrop,
    RandScaleCrop,
    RandSpatialCropSamples,
    RandCropByPosNegLabel,
    RandCropByLabelClasses,
    RandWeightedCrop,
)
_CROPS = (*_DICTIONARY, *_ARRAY)
_SPATIAL_AXES = 3


class _WholeError(Exception):
    """The crop has to be given the whole item, for one of `stats.WHOLE_REASONS`."""


@dataclass(frozen=True)
class WholeItem:
    """Says that a crop has to be given the whole item.

    Attributes
    ----------
    reason : str
        One of `stats.WHOLE_REASONS`.
    """

    reason: str

    def read(self, _entry: Entry, _missing: Callable[[VoxelQuery], None]) -> WholeItem:
        """Return itself: for crops of which this is known before any entry is read."""
        return self

    @property
    def patch(self) -> tuple[int, ...]:
        """Nothing: such a crop reads whole items."""
        return ()

    def query(self, _tree: Json) -> None:
        """Return None: such a crop needs no index."""


@dataclass(frozen=True)
class CropPushdown:
    """A random crop of a pipeline that can be pushed down to the reading of an entry.

    Attributes
    ----------
    crop : Transform
        The crop, of MONAI.
    enclosing : tuple of (Compose, int)
        The pipeline and, if the crop is the first of nested ``Compose`` objects, these, outermost first; each with the
        index of the transform that holds the crop.
    track_meta : bool
        Whether the crop gets MetaTensors, or plain tensors in their place.
    """

    crop: Any
    enclosing: tuple[tuple[Compose, int], ...]
    track_meta: bool

    @property
    def patch(self) -> tuple[int, ...]:
        """What the crop keeps of an item, in voxels along its spatial axes, as far as it is known beforehand."""
        return _patch(self.crop)

    def query(self, tree: Json) -> VoxelQuery | None:
        """Describe the index that the crop could choose its centres from in items of a payload tree, if any."""
        return voxel_query(self.crop, tree) if isinstance(self.crop, _DICTIONARY) else None

    def read(self, entry: Entry, missing: Callable[[VoxelQuery], None]) -> Any:
        """Return what the crop makes of an entry, reading only that.

        Parameters
        ----------
        entry : Entry
            Where the item is.
        missing : callable
            ``missing(query)`` is told of an index that the entry lacks.

        Returns
        -------
        object
            What the crop transform would return for the whole item; `WholeItem` if it has to be given the whole item,
            with its random state as it was before.
        """
        states = [(r, r.get_state()) for r in _random_states(self.crop)]
        try:
            return self._cropped(entry, missing)
        except _WholeError as e:
            _put_back(states)
            return WholeItem(str(e))
        except BaseException:
            _put_back(states)
            raise

    def finish(self, samples: Any) -> Any:
        """Run the rest of the pipeline on what `read` returned."""
        for pipeline, index in reversed(self.enclosing):
            if index + 1 < len(pipeline.transforms):
                samples = pipeline(samples, start=index + 1)
        return samples

    def _cropped(self, entry: Entry, missing: Callable[[VoxelQuery], None]) -> Any:
        stand_ins = _StandIns(entry, self.track_meta)
        item, crop = stand_ins.item(), self.crop
        if isinstance(crop, _DICTIONARY):
            if type(item) is not dict:
                raise _WholeError("crop_item")
            whole = set(item) - set(crop.keys)
            if isinstance(crop, RandWeightedCropd):
                whole.add(crop.w_key)
            item = {k: stand_ins.whole(v) if k in whole else v for k, v in item.items()}
            guided = with_indices(crop, item, entry, stand_ins.whole, missing)
            if guided is None:
                raise _WholeError("no_index")
            crop, item = guided
        pipeline = self.enclosing[-1][0]
        try:
            cropped = apply_transform(crop, item, pipeline.map_items, pipeline.unpack_items, lazy=False)
        except RuntimeError as e:  # what a tensor without memory cannot do; if it is the crop's own, it comes again
            if isinstance(e.__cause__, EntryDamagedError | OSError | MemoryError):  # in reading the index
                raise e.__cause__ from None
            raise _WholeError("crop_values") from e
        return stand_ins.cropped(cropped)


def find_crop(pipeline: Compose, start: int, track_meta: bool = True) -> CropPushdown | WholeItem | None:
    """Return the crop that is the first transform to run on every access.

    Parameters
    ----------
    pipeline : Compose
        The whole pipeline.
    start : int
        Index of the first transform that is not cached.
    track_meta : bool
        Whether the crop gets MetaTensors.

    Returns
    -------
    CropPushdown, WholeItem or None
        None if it is not a crop at all; `WholeItem` for a crop that cannot be pushed down.
    """
    enclosing: list[tuple[Compose, int]] = []
    index = start
    while isinstance(pipeline, Compose) and index < len(pipeline.transforms):
        step = pipeline.transforms[index]
        usable = type(pipeline) is Compose and pipeline.map_items is True and not pipeline.unpack_items
        if not usable or pipeline.lazy is not False:
            return _unsupported(step)
        enclosing.append((pipeline, index))
        if type(step) in _CROPS and not getattr(step, "lazy", False):
            return CropPushdown(step, tuple(enclosing), track_meta)
        if type(step) is not Compose:
            return _unsupported(step)
        pipeline, index = step, 0
    return None


def _patch(crop: Any) -> tuple[int, ...]:
    inner = crop
    while hasattr(inner, "cropper"):
        inner = inner.cropper
    if isinstance(inner, RandScaleCrop):  # a part of each image
        return ()
    size = getattr(inner, "roi_size", getattr(inner, "spatial_size", None))
    sizes = (size,) * _SPATIAL_AXES if isinstance(size, int) else size
    usual = isinstance(sizes, list | tuple) and all(n is None or isinstance(n, int) for n in sizes)
    return tuple(n or 0 for n in sizes) if usual and sizes else ()


def _unsupported(step: Any) -> WholeItem | None:
    """Return a refusal for anything that may crop, None for everything else."""
    if isinstance(step, Compose):
        steps = step.transforms
        return next((found for found in map(_unsupported, steps) if found), None) if steps else None
    return WholeItem("crop_unsupported") if "Crop" in type(step).__name__ or isinstance(step, _CROPS) else None


class _StandIns:
    """The tensors of an entry, without memory until they are filled."""

    def __init__(self, entry: Entry, track_meta: bool) -> None:
        self._entry = entry
        self._track_meta = track_meta
        self._origins: dict[int, tuple[torch.Tensor, Json]] = {}  # stand-in and its node, by the address of its storage

    def item(self) -> Any:
        """Return the item with stand-ins for its large tensors."""
        return decode_item(
            self._entry.tree, self._entry.read, torch_leaf_codecs(track_meta=self._track_meta, decode=self._stand_in)
        )

    def whole(self, value: Any) -> Any:
        """Return a value of the item with its stand-ins read whole."""
        return _mapped(value, lambda tensor: self._filled(tensor, self._entry.read(self._origin(tensor)[1])))

    def cropped(self, value: Any) -> Any:
        """Return what a crop made of stand-ins with the boxes read, those of one array together."""
        boxes: dict[str, list[Region]] = {}
        for view in _stand_ins(value):
            stand_in, name = self._origin(view)
            boxes.setdefault(name, []).append(_box(view, stand_in))
        arrays = {name: iter(self._entry.read_boxes(name, regions)) for name, regions in boxes.items()}
        return _mapped(value, lambda view: self._filled(view, next(arrays[self._origin(view)[1]])))

    def _stand_in(self, node: Json, decoder: Decoder) -> torch.Tensor:
        ref = node["data"]
        if "array" not in ref or "device" in node:
            return decode_tensor(node, decoder)
        name = decoder.claim(ref)
        shape, dtype = self._entry.describe(name)
        if tuple(ref["shape"]) != shape or ref["dtype"] != dtype.str:
            raise EntryDamagedError(f"its payload and its arrays disagree on {name!r:.100}")
        like = with_dtype(torch.from_numpy(np.empty(1, dtype)), node)
        stand_in = torch.empty(shape, dtype=like.dtype, device="meta")
        self._origins[_address(stand_in)] = (stand_in, node)
        return stand_in

    def _origin(self, view: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Return the stand-in that a tensor is a view of, and the name of its array."""
        try:
            stand_in, node = self._origins[_address(view)]
        except KeyError:
            raise _WholeError("crop_box") from None
        return stand_in, node["data"]["array"]

    def _filled(self, view: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        """Return a stand-in, or view of one, with values and its own metadata."""
        tensor = with_dtype(torch.from_numpy(array), self._origins[_address(view)][1])
        if isinstance(view, MetaTensor):
            tensor = tensor.as_subclass(MetaTensor)
            tensor.__dict__.update(view.__dict__)
        return tensor


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch's own way to tell storages apart


def _box(view: torch.Tensor, stand_in: torch.Tensor) -> Region:
    """Return the box of the stand-in that a view shows."""
    if view.stride() != stand_in.stride() or view.dtype != stand_in.dtype or not view.numel():
        raise _WholeError("crop_box")
    offset = view.storage_offset()
    starts = []
    for stride in stand_in.stride():
        starts.append(offset // stride)
        offset %= stride
    region = tuple((start, start + n) for start, n in zip(starts, view.shape, strict=True))
    if any(stop > n for (_, stop), n in zip(region, stand_in.shape, strict=True)):
        raise _WholeError("crop_box")
    return region


def _stand_ins(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors without memory in a value, in the order of `_mapped`."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            yield value
    elif type(value) is dict:
        for v in value.values():
            yield from _stand_ins(v)
    elif type(value) in (list, tuple):
        for v in value:
            yield from _stand_ins(v)


def _mapped(value: Any, fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors without memory replaced."""
    if isinstance(value, torch.Tensor):
        return fill(value) if value.device.type == "meta" else value
    if type(value) is dict:
        return {k: _mapped(v, fill) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, fill) for v in value)
    return value


def _random_states(crop: Any) -> list[np.random.RandomState]:
    """Return the random states that a crop draws from: its own and those of the transforms that it holds."""
    holders = [crop, *(v for v in vars(crop).values() if isinstance(v, Randomizable))]
    return list({id(holder.R): holder.R for holder in holders}.values())


def _put_back(states: list[tuple[np.random.RandomState, Any]]) -> None:
    for random, state in states:
        random.set_state(state)
