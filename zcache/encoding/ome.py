"""Entries as OME-Zarr 0.5 images, so that viewers open them: which arrays are images, their axes, and where they lie.

An entry's ``attributes.ome`` lists its image-like arrays, the main one first, each with one level of resolution. Labels
over an image are OME labels, in groups of their own below ``labels/``.

What viewers are shown are the arrays as they are stored: the numbers themselves where these were narrowed to a smaller
type, codes in the order of the values where there is a look-up table or a grid of levels.

0.5 has neither rotations nor flips, and an axis's scale is a positive distance. So coordinates are millimetres along
the volume's own axes (see `zcache.encoding.orientation.origin`), which bear the names of the world axes that they run
along most closely: x to the patient's right or left, y anterior or posterior, z superior or inferior. Where an axis
runs against the world's (RAS), its coordinates are the negative of the world's: a volume in LPS orientation has LPS
coordinates. Images and labels of one orientation lie over each other; the affine itself is in the payload.

The specification wants channels before space, without exception: arrays with channels last are not listed. It
recommends space in the order z, y, x, which MONAI's arrays do not have: theirs stays, with names that say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zcache.encoding.geometry import Geometry, choose_image, geometry, is_called_label, spatial_meta
from zcache.encoding.narrowing import Narrowing
from zcache.encoding.orientation import origin
from zcache.encoding.payload import Json
from zcache.encoding.places import ArrayPlace, array_places
from zcache.encoding.plain import BFLOAT16

__all__ = ["LABELS", "LEVEL", "Image", "entry_metadata", "find_images", "is_label", "label_groups"]

VERSION = "0.5"
LABELS = "labels"
"""Name of the group of an entry that holds its labels."""

LEVEL = "0"
"""Name of a label's array, the only level of resolution, in the label's own group."""

_2D, _3D = 2, 3
_WORLD = "xyz"
_NUMBERS = "biuf"


@dataclass(frozen=True, slots=True)
class Image:
    """An array of an entry that viewers can show.

    Attributes
    ----------
    name : str
        Of the array.
    axes : str
        Names of its axes in order, one letter each: ``c`` for channels, then two or three of ``xyz``.
    scale : tuple of float
        Distance of neighbours along each axis: millimetres in space, 1.0 where nothing is known.
    translation : tuple of float
        Coordinate of the first voxel along each axis; empty if there is no affine.
    over_image : bool
        Called a label, of one channel, and of the extents of an image of the entry.
    """

    name: str
    axes: str
    scale: tuple[float, ...]
    translation: tuple[float, ...]
    over_image: bool = False


def find_images(tree: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Image]:
    """Find the arrays of an item that are images of two or three axes of space, with or without one of channels.

    Parameters
    ----------
    tree : Json
        A payload tree.
    shapes : mapping of str to tuple of int
        The arrays that are stored.

    Returns
    -------
    dict of str to Image
        By name, the main image first.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.

    Examples
    --------
    >>> ref = {"dtype": "<f4", "shape": [1, 40, 50, 60], "array": "image"}
    >>> found = find_images({"image": {"$ndarray": ref}}, {"image": (1, 40, 50, 60)})
    >>> found["image"].axes, found["image"].scale
    ('cxyz', (1.0, 1.0, 1.0, 1.0))
    """
    found = []
    for place in array_places(tree):
        space = geometry(place, spatial_meta(place)) if _is_shown(place, shapes) else None
        if space is not None and _has_ome_axes(space):
            found.append((place, space))
    main = choose_image(found)
    sizes = {space.size for place, space in found if not is_called_label(place)}
    found.sort(key=lambda one: one is not main)  # the others stay in their order
    return {place.name: _image(place, space, sizes) for place, space in found}


def is_label(image: Image, narrowing: Narrowing) -> bool:
    """Whether an array is stored as an OME label: over an image, its codes integers that are the values themselves."""
    plain = narrowing.kind in ("identity", "cast")
    return image.over_image and plain and narrowing.code_dtype.kind in "iu"


def entry_metadata(images: Iterable[Image]) -> Json:
    """Return ``attributes.ome`` of an entry; None if it has no images.

    Parameters
    ----------
    images : iterable of Image
        Those that are no OME labels, the main one first.
    """
    listed = [_multiscale(image, image.name) for image in images]
    return {"version": VERSION, "multiscales": listed} if listed else None


def label_groups(labels: Iterable[Image]) -> dict[str, Json]:
    """Return ``attributes.ome`` of the groups of OME labels, by the groups' paths in the entry, the outer one first."""
    own = {
        f"{LABELS}/{image.name}": {
            "version": VERSION,
            "multiscales": [_multiscale(image, LEVEL)],
            "image-label": {"source": {"image": "../../"}},
        }
        for image in labels
    }
    names = [path.partition("/")[2] for path in own]
    return {LABELS: {"version": VERSION, "labels": names}, **own} if own else {}


def _is_shown(place: ArrayPlace, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    numeric = place.is_numeric and place.dtype != BFLOAT16 and not place.dtype.startswith("complex")
    return numeric and place.dtype[1:2] != "c" and shapes.get(place.name) == place.shape


def _has_ome_axes(space: Geometry) -> bool:
    n = len(space.shape)
    return space.channel is None if n == len(space.spatial) else n == len(space.spatial) + 1 and space.channel == 0


def _image(place: ArrayPlace, space: Geometry, sizes: set[tuple[int, ...]]) -> Image:
    n = len(space.spatial)
    turned = space.orientation
    # As planes are drawn: without an affine, an image has its rows first.
    axes = "yx" if space.affine is None and n == _2D else "".join(_WORLD[axis] for axis in turned.axes)
    scale = tuple(step if _is_positive(step) else 1.0 for step in turned.spacing)
    translation = () if space.affine is None else origin(space.affine, n)
    over_image = is_called_label(place) and space.n_channels == 1 and space.size in sizes
    if space.channel is None:
        return Image(place.name, axes, scale, translation, over_image)
    return Image(place.name, f"c{axes}", (1.0, *scale), (0.0, *translation) if translation else (), over_image)


def _is_positive(step: float) -> bool:
    return 0 < step < float("inf")


def _multiscale(image: Image, path: str) -> Json:
    unit = {"unit": "millimeter"} if image.translation else {}
    axes = [
        {"name": "c", "type": "channel"} if name == "c" else {"name": name, "type": "space", **unit}
        for name in image.axes
    ]
    steps: list[Json] = [{"type": "scale", "scale": list(image.scale)}]
    if image.translation:
        steps.append({"type": "translation", "translation": list(image.translation)})
    return {"name": image.name, "axes": axes, "datasets": [{"path": path, "coordinateTransformations": steps}]}
