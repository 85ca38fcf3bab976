"""Switches of the whole process that change what transforms return: they count in every key."""

from __future__ import annotations

import os
import sys
from typing import Any

from zcache.keys.values import Json

__all__ = ["switches"]

# Environment variables that MONAI's transforms read each time, and what they take their absence for.
_MONAI_VARIABLES = {"MONAI_DICOM_READER": "", "MONAI_TRACE_TRANSFORM": "1"}


def switches() -> dict[str, Json]:
    """Return the switches of this process and thread that do not stand where they do by default.

    Those of PyTorch: the default dtype and device, autocast on the CPU, the precision of matrix products; not whether
    algorithms are deterministic, since what the others return may be this or that. Those of MONAI:
    `monai.data.set_track_meta`, the variables ``USE_META_DICT``, ``BUILD_MONAI`` (compiled resampling),
    ``MONAI_TRACE_TRANSFORM`` and ``MONAI_DICOM_READER``. Neither is imported: a switch of a package that is not loaded
    stands at its default.

    Returns
    -------
    dict of str to Json
        Values by name; empty where nothing was switched.

    Examples
    --------
    >>> import torch
    >>> torch.set_default_dtype(torch.float64)
    >>> switches()
    {'torch.default_dtype': 'torch.float64'}
    >>> torch.set_default_dtype(torch.float32)
    >>> switches()
    {}
    """
    found = _of_torch(sys.modules.get("torch")) | _of_monai(sys.modules.get("monai.data.meta_obj"))
    return {name: value for name, (value, default) in found.items() if value != default}


def _of_torch(torch: Any) -> dict[str, tuple[Json, Json]]:
    if torch is None:
        return {}
    autocast = torch.is_autocast_enabled("cpu")
    return {
        "torch.default_dtype": (str(torch.get_default_dtype()), "torch.float32"),
        "torch.default_device": (str(torch.get_default_device()), "cpu"),
        "torch.autocast": (str(torch.get_autocast_dtype("cpu")) if autocast else None, None),
        "torch.float32_matmul_precision": (torch.get_float32_matmul_precision(), "highest"),
    }


def _of_monai(meta_obj: Any) -> dict[str, tuple[Json, Json]]:
    if meta_obj is None:
        return {}
    config = sys.modules["monai.config"]
    return {
        "monai.track_meta": (meta_obj.get_track_meta(), True),
        "monai.use_meta_dict": (bool(config.USE_META_DICT), False),
        "monai.use_compiled": (bool(config.USE_COMPILED), False),
        **{name: (os.environ.get(name, default), default) for name, default in _MONAI_VARIABLES.items()},
    }
