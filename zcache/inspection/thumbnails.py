"""Small pictures of volumes for notebooks: one slice is read, and written as PNG without any imaging package."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from zcache.encoding.geometry import choose_image
from zcache.inspection.planes import Plane, window
from zcache.inspection.subjects import read_planes, shown_arrays

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["png", "thumbnail_uri"]

_PIXELS = 96  # of the longer side
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def thumbnail_uri(entry: EntryView, view: str = "axial") -> str:
    """Return the middle slice of an entry's image as a data URI; an empty string if it has no image.

    Raises
    ------
    ZCacheError, OSError
        The entry cannot be read.
    """
    chosen = choose_image(shown_arrays(entry))
    if chosen is None:
        return ""
    plane = read_planes(entry, *chosen, views=(view,))[0]
    return f"data:image/png;base64,{base64.b64encode(png(_shrunk(plane))).decode('ascii')}"


def png(image: np.ndarray) -> bytes:
    r"""Return an image as PNG: uint8, grey (rows, columns) or colours (rows, columns, 3).

    Examples
    --------
    >>> png(np.zeros((2, 3), np.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    rows, columns = image.shape[:2]
    lines = np.ascontiguousarray(image, np.uint8).reshape(rows, -1)
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), lines], axis=1)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2 if image.ndim > 2 else 0, 0, 0, 0)  # noqa: PLR2004
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(raw.tobytes())), (b"IEND", b"")
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def grey(image: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return an image as uint8, from black to white within limits."""
    low, high = limits
    if image.dtype.kind == "c":
        image = np.abs(image)
    scaled = (image.astype(np.float64) - low) / (high - low)
    return (np.nan_to_num(scaled, nan=0.0).clip(0, 1) * 255).astype(np.uint8)


def _shrunk(plane: Plane) -> np.ndarray:
    """Return a plane in its true proportions, in so many pixels that it fits into a table."""
    image = plane.image
    if image.ndim > 2:  # noqa: PLR2004
        image = image.mean(axis=-1)
    if image.dtype.kind == "c":
        image = np.abs(image)
    height, width = image.shape[0] * plane.aspect, float(image.shape[1])
    scale = _PIXELS / max(height, width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    nearest = np.ix_(
        (np.arange(rows) * image.shape[0] // rows).clip(0, image.shape[0] - 1),
        (np.arange(columns) * image.shape[1] // columns).clip(0, image.shape[1] - 1),
    )
    return grey(image[nearest], window([image]))
