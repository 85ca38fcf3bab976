"""Entries in notebooks: the viewer that is installed, handed what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from zcache.errors import CacheConfigError, MissingExtraError
from zcache.inspection import extras
from zcache.inspection.planes import VIEWS
from zcache.inspection.subjects import picked, picked_label
from zcache.inspection.windows import Window

if TYPE_CHECKING:
    from types import ModuleType

    from zcache.inspection.entry import EntryView

__all__ = ["Viewer", "view"]

Viewer: TypeAlias = Literal["niivue", "slices"]

_EXTRA = "notebook"
_ROOMS = {"niivue": "niivue", "slices": "slider"}


def view(
    entry: EntryView,
    image: str | None = None,
    label: str | bool | None = None,
    channel: int = 0,
    window: Window = None,
    viewer: Viewer | None = None,
) -> Any:
    """Show an entry in a notebook; see `EntryView.view`."""
    if viewer is not None and viewer not in _ROOMS:
        raise CacheConfigError(f"viewer={viewer!r} is neither 'niivue' nor 'slices'")
    subject = picked(entry, image)
    over = picked_label(entry, subject, label)
    if not 0 <= channel < subject[1].n_channels:
        raise CacheConfigError(f"channel={channel} is not one of the {subject[1].n_channels} channels, 0 to start with")
    flat = len(subject[1].spatial) < len(VIEWS)
    room = extras.load(_ROOMS[viewer], _EXTRA) if viewer else _installed(flat)
    return room.show(entry, subject, over, channel, window)


def _installed(flat: bool) -> ModuleType:
    """Return the module for the best viewer that is there; there is nothing to turn about an image of two axes."""
    if not flat:
        try:
            return extras.load(_ROOMS["niivue"], _EXTRA)
        except MissingExtraError:
            pass
    return extras.load(_ROOMS["slices"], _EXTRA)
