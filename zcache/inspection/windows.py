"""Which values are black and white: given as two numbers, by the name of a CT window, or taken from the values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from zcache.errors import CacheConfigError
from zcache.inspection.planes import window as percentiles

__all__ = ["PRESETS", "Window", "is_hounsfield", "limits", "parse_window", "real"]

Window: TypeAlias = "tuple[float, float] | str | None"
"""Black and white in the units of the values, the name of a CT window, or None: by percentiles."""

PRESETS = {
    "brain": (0.0, 80.0),
    "soft tissue": (-150.0, 250.0),
    "lung": (-1350.0, 150.0),
    "bone": (-500.0, 1300.0),
}
"""Of CT in Hounsfield units: level ∓ half of the width, which are 40/80, 50/400, −600/1500 and 400/1800 in "Windowing
(CT)" of Radiopaedia, https://radiopaedia.org/articles/windowing-ct."""

_FAT, _TISSUE, _METAL = -100, 40, 32767


def parse_window(text: str) -> tuple[float, float] | str:
    """Read a window as it is typed: ``low,high``, or the name of a CT window.

    Raises
    ------
    CacheConfigError
        It is neither.

    Examples
    --------
    >>> parse_window("-160,240"), parse_window("Soft-Tissue")
    ((-160.0, 240.0), 'soft tissue')
    """
    name = " ".join(text.casefold().replace("-", " ").replace("_", " ").split())
    if name in PRESETS:
        return name
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise CacheConfigError(
            f"the window {text!r} is neither LOW,HIGH such as -160,240 nor one of {', '.join(map(repr, PRESETS))}"
        ) from None
    return low, high


def is_hounsfield(images: Iterable[np.ndarray]) -> bool:
    """Whether values look like Hounsfield units: from fat (−100) or less to tissue (40) or more, within 16 bits.

    Examples
    --------
    >>> is_hounsfield([np.array([-1000, 60])]), is_hounsfield([np.array([0.0, 900.0])])
    (True, False)
    """
    finite = [flat[np.isfinite(flat)] for flat in (np.ravel(real(image)) for image in images)]
    ends = [(float(flat.min()), float(flat.max())) for flat in finite if flat.size]
    if not ends:
        return False
    low, high = min(a for a, _ in ends), max(b for _, b in ends)
    return -_METAL - 1 <= low <= _FAT and _TISSUE <= high <= _METAL


def limits(window: Window, images: list[np.ndarray]) -> tuple[float, float]:
    """Return the values that are drawn black and white.

    Parameters
    ----------
    window : (low, high), str or None
        As given by the user. None: the 1st and 99th percentile of the images.
    images : list of numpy.ndarray
        What is drawn.

    Raises
    ------
    CacheConfigError
        It is no window; or a CT window is asked for, and the values are no Hounsfield units.
    """
    if window is None:
        return percentiles([real(image) for image in images])
    if isinstance(window, str):
        window = parse_window(window)
    if isinstance(window, str):
        if not is_hounsfield(images):
            raise CacheConfigError(
                f"window={window!r} is one of CT in Hounsfield units, which these values do not look like (fat is at "
                "-100, tissue at 40): give (low, high) in their own units"
            )
        return PRESETS[window]
    low, high = (float(value) for value in window)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise CacheConfigError(f"window=({low:g}, {high:g}) is not a lower and a higher value")
    return low, high


def real(image: np.ndarray) -> np.ndarray:
    """Return the numbers that are drawn: magnitudes of complex ones."""
    return np.abs(image) if image.dtype.kind == "c" else image
