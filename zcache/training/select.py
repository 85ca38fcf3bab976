"""The voxels that a label-guided crop chooses its centres from, handed to it so that it need not see the label."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from monai.transforms import (
    RandCropByLabelClassesd,
    RandCropByPosNegLabeld,
    map_binary_to_indices,
    map_classes_to_indices,
)

__all__ = ["with_indices"]

_FOREGROUND, _BACKGROUND, _CLASSES = "zcache foreground", "zcache background", "zcache classes"


def with_indices(crop: Any, item: dict[Any, Any], whole: Callable[[Any], Any]) -> tuple[Any, dict[Any, Any]] | None:
    """Give a label-guided crop the voxel indices that it would compute from the label.

    Parameters
    ----------
    crop : Transform
        Any crop of a dictionary pipeline.
    item : dict
        The item; its label and image may be stand-ins.
    whole : callable
        ``whole(value)`` reads a value of the item whole.

    Returns
    -------
    crop, item
        The same for crops that are not guided by a label, or that find their indices in the item. Otherwise a copy of
        the crop that shares its random state, and the item with the indices under the keys that the copy reads.
        None if the crop needs image and label whole, so that nothing is saved.
    """
    if isinstance(crop, RandCropByPosNegLabeld) and not {crop.fg_indices_key, crop.bg_indices_key} <= set(item):
        if crop.image_key in item:
            return None
        foreground, background = map_binary_to_indices(whole(item[crop.label_key]))
        rest = {k: v for k, v in item.items() if k not in (crop.fg_indices_key, crop.bg_indices_key)}
        crop = copy.copy(crop)
        crop.fg_indices_key, crop.bg_indices_key = _FOREGROUND, _BACKGROUND
        return crop, {**rest, _FOREGROUND: foreground, _BACKGROUND: background}
    if isinstance(crop, RandCropByLabelClassesd) and crop.indices_key not in item:
        if crop.image_key in item:
            return None
        inner = crop.cropper
        label = whole(item[crop.label_key])
        indices = map_classes_to_indices(label, inner.num_classes, max_samples_per_class=inner.max_samples_per_class)
        crop = copy.copy(crop)
        crop.indices_key = _CLASSES
        return crop, {**item, _CLASSES: indices}
    return crop, item
