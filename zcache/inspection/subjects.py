"""What of an entry can be shown: its volumes and images, each with its geometry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zcache.encoding.geometry import Geometry, choose_image, choose_label, geometry, spatial_meta
from zcache.encoding.places import ArrayPlace
from zcache.errors import CacheConfigError, EntryNotFoundError
from zcache.inspection.planes import VIEWS, Plane, planes

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["picked", "picked_label", "read_planes", "shown_arrays"]


def shown_arrays(entry: EntryView) -> list[tuple[ArrayPlace, Geometry]]:
    """Return the arrays of an entry that can be drawn."""
    found = ((place, geometry(place, spatial_meta(place))) for place in entry.places)
    return [(place, space) for place, space in found if space is not None]


def picked(entry: EntryView, name: str | None) -> tuple[ArrayPlace, Geometry]:
    """Return the array of an entry that is meant, or the largest that is not called a label.

    Raises
    ------
    EntryNotFoundError
        There is none that could be drawn.
    """
    found = shown_arrays(entry)
    if name is None:
        chosen = choose_image(found)
    else:
        chosen = next((one for one in found if name in (one[0].place, one[0].name)), None)
    if chosen is None:
        what = "no image" if name is None else f"no image {name!r}"
        known = ", ".join(repr(place.place) for place, _ in found) or "no array of two axes or more"
        raise EntryNotFoundError(f"the entry {entry.key} has {what}: it has {known}")
    return chosen


def picked_label(
    entry: EntryView, image: tuple[ArrayPlace, Geometry], label: str | bool | None
) -> tuple[ArrayPlace, Geometry] | None:
    """Return the label that is meant to lie over an image: the one that is named, or called so; None if there is none.

    Raises
    ------
    EntryNotFoundError
        The entry has no array of that name.
    CacheConfigError
        It has other extents than the image.
    """
    if label is False:
        return None
    if not isinstance(label, str):
        return choose_label(shown_arrays(entry), image)
    over = picked(entry, label)
    if over[1].size != image[1].size:
        raise CacheConfigError(
            f"the label {label!r} has the extents {over[1].size} in space, the image {image[0].place!r} {image[1].size}"
        )
    return over


def read_planes(
    entry: EntryView, place: ArrayPlace, space: Geometry, channel: int = 0, views: Iterable[str] = VIEWS
) -> list[Plane]:
    """Read the middle slices of an array, and no more of it than these."""
    name = place.name or place.place
    return planes(lambda region: entry.read(name, region), space, channel, views)
