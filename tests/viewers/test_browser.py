"""An entry opens in neuroglancer: at the right place, every voxel that is asked for, and drawn as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
from monai.transforms import EnsureChannelFirstd, LoadImaged

import zcache
from tests.viewers.caches import CODECS, demo_cache, generated_caches
from tests.viewers.neuroglancer import MILLIMETRES, show
from zcache import PersistentDataset
from zcache.inspection.entry import EntryView

# What a shader of neuroglancer can hold, as far as zcache stores it.
NUMBERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
WHITE = 1500  # the code that is drawn as white
CLEAR = {"showAxisLines": False, "showDefaultAnnotations": False, "showScaleBar": False}


def the_entry(cache_dir: Path) -> EntryView:
    [entry] = zcache.open_cache(cache_dir).values()
    return entry


def store_path(folder: Path, entry: EntryView, name: str) -> str:
    """Where the array lies in what is served."""
    [path] = [array.path for array in entry.info.arrays if array.name == name]
    return str((entry.path / path).relative_to(folder))


def attributes(group: Path) -> dict[str, Any]:
    return json.loads((group / "zarr.json").read_text())["attributes"]


def positions(group: Path, voxels: list[tuple[int, ...]]) -> list[list[float]]:
    """Where the group's metadata say that voxels lie, in millimetres."""
    [multiscale] = attributes(group)["ome"]["multiscales"]
    assert [axis["name"] for axis in multiscale["axes"]] == list("cxyz")
    assert {axis["unit"] for axis in multiscale["axes"][1:]} == {"millimeter"}
    [scale, translation] = multiscale["datasets"][0]["coordinateTransformations"]
    steps = zip(scale["scale"][1:], translation["translation"][1:], strict=True)
    return np.stack(
        [start + step * np.array(v) for (step, start), v in zip(steps, zip(*voxels, strict=True), strict=True)], 1
    ).tolist()


def drawn(picture: Path, panel: list[int]) -> np.ndarray:
    """Colours of a panel, 0 to 255: (height, width, 3)."""
    left, top, width, height = panel
    pixels = np.rint(matplotlib.image.imread(picture)[top : top + height, left : left + width, :3] * 255)
    return pixels.astype(int)


def test_an_entry_with_a_label(tmp_path):
    entry = the_entry(demo_cache(tmp_path, subjects=1, resolution=2))
    codes, labels = (entry.arrays[name][0] for name in ("image", "label"))
    middle = tuple(n // 2 for n in codes.shape)
    voxels = [middle, (middle[0] + 9, *middle[1:]), (middle[0], middle[1] - 20, middle[2])]
    where = positions(entry.path, voxels)
    assert positions(entry.path / "labels" / "label", voxels) == where
    world = [(entry.meta["image"]["affine"] @ [*voxel, 1])[:3].tolist() for voxel in voxels]
    assert where == world  # the volume lies in RAS orientation, as the world does
    group = str(entry.path.relative_to(tmp_path))
    scale = 0.5  # millimetres in a pixel
    shown = show(
        tmp_path,
        [
            {
                "name": "image",
                "type": "image",
                "source": group,
                "shaderControls": {"normalized": {"range": [0, WHITE]}},
            },
            {"name": "label", "type": "segmentation", "source": f"{group}/labels/label", "segments": ["1", "2"]},
        ],
        {**CLEAR, "dimensions": MILLIMETRES, "position": where[0], "crossSectionScale": scale, "layout": "xy"},
        tmp_path / "shown.png",
        positions=where,
    )
    assert (shown.failures, shown.messages) == ([], [])
    assert shown.space == [["x", 0.001, "m"], ["y", 0.001, "m"], ["z", 0.001, "m"]]
    assert shown.values == [[str(codes[voxel]), str(labels[voxel])] for voxel in voxels]
    assert shown.requests["GET 206"] > 2  # chunks, one by one

    [panel] = shown.panels
    pixels = drawn(tmp_path / "shown.png", panel)
    # Pixel after pixel, the voxel that lies there; buttons are in the corners.
    rows, columns = (np.arange(n) + 0.5 - n / 2 for n in pixels.shape[:2])
    spacing = np.diff(np.array(positions(entry.path, [(0, 0, 0), (1, 1, 1)])), axis=0)[0]
    x = np.rint(middle[0] + columns * scale / spacing[0]).astype(int)
    y = np.rint(middle[1] + rows * scale / spacing[1]).astype(int)
    inside = np.ix_((y > 0) & (y < codes.shape[1] - 1) & (abs(rows) < 220), (x > 0) & (x < codes.shape[0] - 1))
    at = np.ix_(x[inside[1][0]], y[inside[0][:, 0]], [middle[2]])
    expected, label = codes[at][..., 0].T, labels[at][..., 0].T
    found = pixels[inside]
    grey = np.minimum(expected / WHITE, 1) * 255
    plain = label == 0
    assert np.mean(abs(found.max(-1) - grey)[plain] <= 2) > 0.97  # the others are at the edges of voxels
    assert np.unique(found[plain]).size > 50
    assert np.mean(np.ptp(found, -1)[plain] <= 2) > 0.97
    assert np.mean(np.ptp(found, -1)[~plain] > 20) > 0.97  # in colour


def test_a_volume_in_another_orientation(volumes, tmp_path):
    """Coordinates along the volume's own axes: left, posterior, superior."""
    items = [{"image": volumes[0]["image"]}]
    with PersistentDataset(items, [LoadImaged("image"), EnsureChannelFirstd("image")], tmp_path) as dataset:
        image = dataset[0]["image"].numpy()[0]
    entry = the_entry(tmp_path)
    voxels = [(20, 18, 15), (0, 0, 15), (39, 35, 15), (5, 30, 15)]
    where = positions(entry.path, voxels)
    shown = show(
        tmp_path,
        [{"name": "image", "type": "image", "source": str(entry.path.relative_to(tmp_path))}],
        {"dimensions": MILLIMETRES, "position": where[0], "crossSectionScale": 0.2, "layout": "4panel"},
        tmp_path / "shown.png",
        positions=where,
    )
    assert (shown.failures, shown.messages) == ([], [])
    assert shown.values == [[f"{image[voxel]:.0f}"] for voxel in voxels]


def test_every_type_and_codec(tmp_path):
    """Arrays by themselves, all at once."""
    caches = dict(zip(CODECS, generated_caches(tmp_path), strict=False))
    entries = {codec: the_entry(cache) for codec, cache in caches.items()}
    fits = {n: array for n, array in entries["lz4"].arrays.items() if array.dtype.name in NUMBERS}
    assert {array.dtype.name for array in fits.values()} == NUMBERS
    arrays = [("lz4", name) for name in fits] + [(codec, "arrays.int16") for codec in CODECS[1:]]
    voxel = (0, 11, 20, 30)
    shown = show(
        tmp_path,
        [
            {"name": f"{i}", "type": "image", "source": store_path(tmp_path, entries[c], n)}
            for i, (c, n) in enumerate(arrays)
        ],
        {
            "dimensions": {name: [1, ""] for name in "cxyz"},
            "displayDimensions": list("xyz"),
            "position": [n + 0.5 for n in voxel],
            "layout": "xy",
        },
        tmp_path / "shown.png",
        positions=[[n + 0.5 for n in voxel]],
    )
    assert (shown.failures, shown.messages) == ([], [])
    [found] = shown.values
    assert len(found) == len(arrays)
    for (codec, name), text in zip(arrays, found, strict=True):
        stored = entries[codec].arrays[name][voxel]
        assert np.array_equal(stored.dtype.type(text), stored, equal_nan=stored.dtype.kind == "f"), name
