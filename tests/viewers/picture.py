"""Draw the picture of docs/how-to/viewers.md: ``python -m tests.viewers.picture docs/images/neuroglancer.png``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

import zcache
from tests.viewers.caches import demo_cache
from tests.viewers.neuroglancer import MILLIMETRES, show

__all__ = ["draw"]


def draw(picture: Path) -> None:
    """Show a subject of the demo, its tissues on top, in 256 colours."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = demo_cache(Path(scratch), subjects=1, resolution=1)
        [key] = zcache.open_cache(cache)
        image = {"name": "image", "type": "image", "shaderControls": {"normalized": {"range": [0, 1500]}}}
        label = {"name": "label", "type": "segmentation", "segments": ["1", "2"], "selectedAlpha": 0.25}
        shown = show(
            cache / "cache.zarr",
            [{**image, "source": key}, {**label, "source": f"{key}/labels/label"}],
            {
                "dimensions": MILLIMETRES,
                "position": [2, -18, 14],
                "crossSectionScale": 0.62,
                "crossSectionOrientation": [1, 0, 0, 0],  # the front and the top of the head are up
                "projectionOrientation": [0.83, 0.12, 0.1, 0.53],
                "projectionScale": 330,
                "layout": "4panel",
                "showAxisLines": False,
            },
            picture,
            size=(900, 720),
        )
    if shown.failures or shown.messages:
        raise SystemExit("\n".join(shown.failures + shown.messages))
    with Image.open(picture) as drawn:
        few = drawn.convert("RGB").quantize(256)
    few.save(picture, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
