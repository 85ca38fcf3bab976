"""Colours of label classes, the same in figures, pictures and viewers."""

from __future__ import annotations

import numpy as np

__all__ = ["COLOURS", "blended", "class_colours", "codes", "overlay"]

_HEX = (
    "e6194b 3cb44b 4f7bf0 ffe119 f58231 b04ad8 42d4f4 f032e6 bfef45 fabed4 "
    "5fb3aa dcbeff c08a3e fffac8 e07a6a aaffc3 b5b52a ffd8b1"
)
COLOURS = np.array([[int(text[i : i + 2], 16) for i in (0, 2, 4)] for text in _HEX.split()], np.uint8)
"""(18, 3) uint8, told apart easily on grey: after S. Trubetskoy, "20 simple, distinct colors", the dark ones lightened.
Classes 1 to 18 have one each, then they begin anew."""

_INSIDE, _EDGE = 0.35, 0.9  # opacity: what lies under a class can be seen, where it ends too


def class_colours(values: np.ndarray) -> np.ndarray:
    """Return the colours of classes.

    Parameters
    ----------
    values : numpy.ndarray
        Integers of any shape; those below 1 get a colour too, which nothing should be drawn in.

    Returns
    -------
    numpy.ndarray
        uint8, of the same shape with an axis of red, green and blue.
    """
    colours: np.ndarray = COLOURS[(np.asarray(values) - 1) % len(COLOURS)]
    return colours


def codes(label: np.ndarray) -> np.ndarray:
    """Return a label's classes as int64, whatever type it has; what is no number is background.

    Examples
    --------
    >>> codes(np.array([0.0, 2.0, np.nan, np.inf])).tolist()
    [0, 2, 0, 0]
    """
    if label.dtype.kind in "biu":
        return label.astype(np.int64)
    real = np.abs(label) if label.dtype.kind == "c" else label
    wide = np.nan_to_num(real.astype(np.float64), posinf=0, neginf=0)
    return np.rint(wide, out=wide).clip(-(2.0**62), 2.0**62).astype(np.int64)


def overlay(classes: np.ndarray) -> np.ndarray:
    """Return what is drawn over a slice: classes in their colours, their edges strong and their insides faint.

    Parameters
    ----------
    classes : numpy.ndarray
        (rows, columns), integers; 0 and below are background.

    Returns
    -------
    numpy.ndarray
        (rows, columns, 4) uint8: red, green, blue and opacity, which is 0 in the background.
    """
    edge = np.zeros(classes.shape, bool)
    down, right = classes[1:] != classes[:-1], classes[:, 1:] != classes[:, :-1]
    edge[1:] |= down
    edge[:-1] |= down
    edge[:, 1:] |= right
    edge[:, :-1] |= right
    opacity = np.where(edge, round(_EDGE * 255), round(_INSIDE * 255)) * (classes > 0)
    return np.concatenate([class_colours(classes), opacity.astype(np.uint8)[..., None]], axis=-1)


def blended(grey: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Return a slice with what is drawn over it.

    Parameters
    ----------
    grey : numpy.ndarray
        (rows, columns) uint8.
    over : numpy.ndarray
        (rows, columns, 4) uint8, from `overlay`.

    Returns
    -------
    numpy.ndarray
        (rows, columns, 3) uint8.
    """
    opacity = over[..., 3:] / 255
    mixed: np.ndarray = np.rint(grey[..., None] * (1 - opacity) + over[..., :3] * opacity).astype(np.uint8)
    return mixed
