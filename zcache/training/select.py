"""The voxels that a label-guided crop chooses its centres from, handed to it so that it need not see the label.

MONAI's crops compute, on every call, the flat indices of all foreground and background voxels (or of each class), and
then ask only for their number and for a few of them. Here the entry answers, from an index that MONAI's own functions
filled (`map_binary_to_indices`, `map_classes_to_indices`), range by range.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import monai
import numpy as np
import torch
from monai.transforms import (
    RandCropByLabelClassesd,
    RandCropByPosNegLabeld,
    map_binary_to_indices,
    map_classes_to_indices,
)

from zcache.encoding.payload import Json
from zcache.encoding.voxels import VoxelQuery, VoxelSet
from zcache.storage.entry import Entry
from zcache.storage.voxels import open_sets
from zcache.training.leaves import with_dtype

__all__ = ["voxel_query", "with_indices"]

_FOREGROUND, _BACKGROUND, _CLASSES = "zcache foreground", "zcache background", "zcache classes"
_RANGE_VOXELS = 2**20  # so much at a time keeps MONAI's lists of indices in a few MB


@dataclass(frozen=True)
class _Guide:
    """What a label-guided crop looks at.

    Attributes
    ----------
    label, image : key
        Keys of the item; `image` is None if the crop has none, or the item does not hold it.
    threshold : float
        Of the image.
    binary : bool
        Whether it tells foreground from background, or each class from the others.
    classes : int or None
        Number of classes of an argmax label.
    """

    label: Any
    image: Any
    threshold: float
    binary: bool
    classes: int | None

    def find(
        self, label: torch.Tensor, image: torch.Tensor | None, max_samples: int | None = None
    ) -> Sequence[torch.Tensor]:
        """Return the flat indices that MONAI's crop would work out."""
        if self.binary:
            found: Sequence[torch.Tensor] = map_binary_to_indices(label, image, self.threshold)
        else:
            found = map_classes_to_indices(label, self.classes, image, self.threshold, max_samples)
        return found


def with_indices(
    crop: Any,
    item: dict[Any, Any],
    entry: Entry,
    whole: Callable[[Any], Any],
    missing: Callable[[VoxelQuery], None],
) -> tuple[Any, dict[Any, Any]] | None:
    """Give a label-guided crop the voxel indices that it would compute from the label.

    Parameters
    ----------
    crop : Transform
        Any crop of a dictionary pipeline.
    item : dict
        The item; its label and image may be stand-ins.
    entry : Entry
        Where the item is.
    whole : callable
        ``whole(value)`` reads a value of the item whole.
    missing : callable
        ``missing(query)`` is told of the index that the entry lacks.

    Returns
    -------
    crop, item
        The same for crops that are not guided by a label, or that find their indices in the item. Otherwise a copy of
        the crop that shares its random state, and the item with the indices under the keys that the copy reads.
        None if the crop needs image and label whole, for lack of an index.
    """
    guide = _guide(crop, item)
    if guide is None:
        return crop, item
    max_samples = None if guide.binary else crop.cropper.max_samples_per_class
    query = voxel_query(crop, entry.tree)
    sets: Sequence[Any] | None = None if query is None else open_sets(entry, query)
    if sets is not None:
        sets = [_thinned(voxels, max_samples) for voxels in sets]
    elif query is not None:
        missing(query)
    if sets is None and guide.label in item and (guide.image is None or not _is_stand_in(item[guide.image])):
        # Without the image, which is the larger part by far, there is still much to save.
        image = None if guide.image is None else item[guide.image]
        label = whole(item[guide.label])
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of MONAI; with the whole item it comes again
            sets = guide.find(label, image, max_samples)
    if sets is None:
        return None
    crop = copy.copy(crop)
    if guide.binary:
        item = {k: v for k, v in item.items() if k not in (crop.fg_indices_key, crop.bg_indices_key)}
        crop.fg_indices_key, crop.bg_indices_key = _FOREGROUND, _BACKGROUND
        return crop, {**item, _FOREGROUND: sets[0], _BACKGROUND: sets[1]}
    crop.indices_key = _CLASSES
    return crop, {**item, _CLASSES: sets}


def voxel_query(crop: Any, tree: Json) -> VoxelQuery | None:
    """Describe the index from which a crop could choose its centres.

    Parameters
    ----------
    crop : Transform
        Any crop.
    tree : Json
        Payload tree of an item.

    Returns
    -------
    VoxelQuery or None
        None for crops that are not guided by a label, or that the entry's arrays alone cannot guide.
    """
    guide = _guide(crop, tree) if isinstance(tree, dict) else None
    if guide is None or not isinstance(guide.threshold, int | float) or not isinstance(guide.classes, int | None):
        return None
    nodes = [_tensor_node(tree.get(key)) for key in (guide.label, guide.image) if key is not None]
    if None in nodes:
        return None
    shapes = [tuple(node["data"]["shape"]) for node in nodes]
    n_channels = shapes[0][0]
    one_volume = len({shape[1:] for shape in shapes}) == 1 and len(shapes[0]) > 1
    if not one_volume or not (guide.binary or n_channels > 1 or guide.classes):
        return None  # MONAI refuses these, or broadcasts them
    names = tuple(node["data"]["array"] for node in nodes)

    def find(read: Callable[[str], np.ndarray]) -> Iterator[tuple[int, list[np.ndarray]]]:
        volumes = [with_dtype(torch.from_numpy(read(name)), node) for name, node in zip(names, nodes, strict=True)]
        flat = [volume.reshape(len(volume), -1) for volume in volumes]
        for start in range(0, flat[0].shape[1], _RANGE_VOXELS):
            label, *image = (volume[:, start : start + _RANGE_VOXELS] for volume in flat)
            yield start, [found.numpy() for found in guide.find(label, image[0] if image else None)]

    what = {
        "sets": "foreground, background" if guide.binary else "classes",
        "by": f"monai {monai.__version__}",
        "label": names[0],
        "image": names[1] if guide.image is not None else None,
        "image_threshold": [type(guide.threshold).__name__, float(guide.threshold).hex()],
        "num_classes": guide.classes if n_channels == 1 else None,
        "label_dtype": nodes[0].get("dtype"),
        "image_dtype": nodes[-1].get("dtype"),
    }
    return VoxelQuery(what, names, math.prod(shapes[0][1:]), find)


def _guide(crop: Any, item: dict[Any, Any]) -> _Guide | None:
    """Return what a crop looks at in an item, None if it needs no look."""
    if isinstance(crop, RandCropByPosNegLabeld) and not {crop.fg_indices_key, crop.bg_indices_key} <= set(item):
        classes = None
    elif isinstance(crop, RandCropByLabelClassesd) and crop.indices_key not in item:
        classes = crop.cropper.num_classes
    else:
        return None
    image = crop.image_key if crop.image_key in item else None
    binary = isinstance(crop, RandCropByPosNegLabeld)
    return _Guide(crop.label_key, image, crop.cropper.image_threshold, binary, classes)


def _tensor_node(value: Json) -> Json:
    """Return the node of a tensor on the CPU that is stored as an array of its own, else None."""
    tagged = isinstance(value, dict) and len(value) == 1
    node = value.get("$metatensor", value.get("$tensor")) if tagged else None
    data = node.get("data") if isinstance(node, dict) and "device" not in node else None
    return node if isinstance(data, dict) and "array" in data and data.get("shape") else None


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _thinned(voxels: VoxelSet, max_samples: int | None) -> VoxelSet | _Thinned:
    many = max_samples and len(voxels) > max_samples and len(voxels) > 1
    return _Thinned(voxels, int(max_samples)) if many and max_samples else voxels


class _Thinned:
    """Evenly spaced members of a set, as `map_classes_to_indices` keeps them under ``max_samples_per_class``."""

    def __init__(self, voxels: VoxelSet, n: int) -> None:
        self._voxels = voxels
        self._places = np.round(np.linspace(0, len(voxels) - 1, n)).astype(int)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: Any) -> int:
        return self._voxels[self._places[i]]
