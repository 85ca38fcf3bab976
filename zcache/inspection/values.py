"""The values of an item that are no arrays."""

from __future__ import annotations

from zcache.encoding.payload import Json
from zcache.encoding.places import ARRAY_TAGS, entries, leaves
from zcache.encoding.plain import MALFORMED, plain_item, refuse
from zcache.errors import EntryDamagedError

__all__ = ["scalars"]


def scalars(tree: Json) -> dict[str, str]:
    """Return the values of an item that are no arrays, as text, by their places.

    Names of the files that tensors were loaded from count too.

    Raises
    ------
    EntryDamagedError
        The tree is malformed.

    Examples
    --------
    >>> scalars({"patient": "P001", "age": 63, "parts": {"$tuple": ["left", None]}})
    {'patient': 'P001', 'age': '63', 'parts[0]': 'left', 'parts[1]': 'None'}
    """
    found = {}
    try:
        for place, tag, body in leaves(tree, ""):
            if tag == "$metatensor":
                name = entries(body["meta"]).get("filename_or_obj")
                if isinstance(name, str):
                    found[f"{place}.meta.filename_or_obj"] = name
            elif tag not in ARRAY_TAGS:
                found[place] = str(plain_item({tag: body} if tag else body, refuse))
    except MALFORMED as e:
        raise EntryDamagedError(f"the entry's payload is malformed: {type(e).__name__}: {e!s:.200}") from e
    return found
