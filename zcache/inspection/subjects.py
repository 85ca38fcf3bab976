"""What of an entry can be shown: its volumes and images, each with its geometry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zcache.errors import EntryNotFoundError
from zcache.inspection.planes import VIEWS, Geometry, Plane, choose_image, geometry, planes
from zcache.inspection.values import ArrayPlace

if TYPE_CHECKING:
    from zcache.inspection.entry import EntryView

__all__ = ["picked", "read_planes", "shown_arrays"]


def shown_arrays(entry: EntryView) -> list[tuple[ArrayPlace, Geometry]]:
    """Return the arrays of an entry that can be drawn."""
    meta = entry.meta
    found = ((place, geometry(place, meta.get(place.place))) for place in entry.places)
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


def read_planes(
    entry: EntryView, place: ArrayPlace, space: Geometry, channel: int = 0, views: Iterable[str] = VIEWS
) -> list[Plane]:
    """Read the middle slices of an array, and no more of it than these."""
    name = place.name or place.place
    return planes(lambda region: entry.read(name, region), space, channel, views)
