"""Volumes for the notebooks: brains around the MNI152 template, and generated CTs of torsos. Nothing is downloaded."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nibabel as nib
import numpy as np
from nilearn.datasets import load_mni152_gm_template, load_mni152_template, load_mni152_wm_template
from scipy.ndimage import gaussian_filter, zoom

KEYS = ("image", "label")
ORGANS = ("lungs", "heart", "liver", "spleen", "kidneys", "aorta", "bones", "tumour")
_HEAD = slice(20, 177), slice(20, 213), slice(0, 180)  # of the template, with a margin
_THREADS = 2
_WRITTEN = 1_700_000_000  # seconds since 1970: files of the same age each time, so that keys are the same each time


def brains(folder: str, n: int) -> list[dict[str, str]]:
    """Write `n` T1 images with labels (1 grey matter, 2 white matter, 3 lesion); return their paths.

    They are the template under a smooth bias field, noise and a shift, each with a lesion of its own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of later versions of nilearn
        maps = [load(resolution=1) for load in (load_mni152_template, load_mni152_gm_template, load_mni152_wm_template)]
    head, grey, white = (np.asarray(each.dataobj, np.float32) for each in maps)
    head, grey, white = (each / each.max() for each in (head, grey, white))
    head, grey, white = (each[_HEAD] for each in (head, grey, white))
    affine = maps[0].affine.copy()
    affine[:3, 3] += [part.start for part in _HEAD]
    tissue = np.where(np.maximum(grey, white) > 0.4, np.where(grey >= white, 1, 2), 0).astype(np.uint8)

    def brain(number: int) -> dict[str, str]:
        rng = np.random.default_rng([1, number])
        bias = _smooth(rng, head.shape, 3)
        ball = _ball(head.shape, _place(rng, white), 9)
        lesion = (ball * (1 + 0.35 * _smooth(rng, head.shape, 16)) > 0.5) & (tissue > 0)
        image = head * (900 + 90 * bias) * np.where(lesion, 0.55, 1)
        image += (head > 0) * 18 * rng.standard_normal(head.shape, np.float32)
        label = np.where(lesion, 3, tissue).astype(np.uint8)
        moved = tuple(int(k) for k in rng.integers((-5, -5, 0), 6))  # not down: the brain stem would come out on top
        arrays = (np.roll(a, moved, (0, 1, 2)) for a in (image.clip(0, 4095).astype(np.int16), label))
        return _write(Path(folder), f"brain_{number + 1:02}", arrays, affine)

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(brain, range(n)))


def torsos(folder: str, n: int, spacing: float = 2.0) -> list[dict[str, str]]:
    """Write `n` generated CTs of chest and abdomen with labels (`ORGANS`, from 1 on); return their paths."""

    def one(number: int) -> dict[str, str]:
        arrays = torso(np.random.default_rng([2, number]), spacing)
        affine = np.diag([spacing, spacing, spacing, 1.0])
        return _write(Path(folder), f"torso_{number + 1:02}", arrays, affine)

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(one, range(n)))


def torso(rng: np.random.Generator, spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return Hounsfield units as int16 and organs as uint8, axes right, anterior, superior."""
    shape = tuple(round(length / spacing) for length in (370, 250, 340))
    grid = np.meshgrid(*(spacing * (np.arange(k, dtype=np.float32) - k / 2) for k in shape), indexing="ij")
    x, y, z = (axis + 5 * _smooth(rng, shape, 4) for axis in grid)
    fine, other = _smooth(rng, shape, 26), _smooth(rng, shape, 26)
    tubes = (np.abs(fine) < 0.22) & (np.abs(other) < 0.22)  # where two surfaces meet: a tree of sorts
    size = rng.normal(1, 0.04, 3)

    def blob(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> np.ndarray:
        parts = zip((x, y, z), centre, radii, size, strict=True)
        return sum(((axis - np.float32(c)) * np.float32(1 / (r * s))) ** 2 for axis, c, r, s in parts)

    def ring(a: float, b: float) -> np.ndarray:
        return (x / a) ** 2 + (y / b) ** 2

    body, muscle, inside = ring(165, 108) < 1, ring(150, 95) < 1, ring(134, 80) < 1
    hu = np.full(shape, -1000, np.float32)
    label = np.zeros(shape, np.uint8)

    def put(where: np.ndarray, value: float | np.ndarray, organ: str = "") -> None:
        hu[where] = value[where] if isinstance(value, np.ndarray) else value
        label[where] = ORGANS.index(organ) + 1 if organ else 0

    put(body, -105)
    put(muscle, 55)
    dome = -5 - 0.004 * (np.abs(x) - 70) ** 2 - 0.003 * y**2 + 12 * (x > 0)  # the diaphragm
    put(inside & (z < dome), -95)
    bowel = inside & (z < -70) & (y > -40 + 8 * fine) & (np.abs(x) < 115)
    put(bowel & (_smooth(rng, shape, 12) > 0), 38)
    put(bowel & (other > 1.2), -850)
    ribs = (ring(143, 88) < 1) & ~(ring(133, 78) < 1) & (np.sin((z + 0.55 * y) / 5.2) > 0.25) & (z > -60)
    put(ribs, 480, "bones")
    for side in (-1, 1):
        lung = (blob((72 * side, -2, 50), (58, 74, 125)) < 1) & (z > dome) & inside & (np.abs(x) > 16)
        put(lung, np.where(tubes, 30, -850 + 45 * fine), "lungs")
        kidney = blob((62 * side, -42, -92), (27, 25, 50))
        put(kidney < 1, np.where(kidney < 0.25, 70, 185), "kidneys")
    liver = (blob((62, 8, -42), (92, 72, 66)) < 1) & inside & (z < dome + 4)
    put(liver, np.where(tubes, 165, 108), "liver")
    put((blob((-92, -30, -40), (30, 42, 44)) < 1) & inside & (z < dome), 122, "spleen")
    stomach = (blob((-48, 30, -48), (42, 34, 40)) < 1) & (z < dome)
    put(stomach, np.where(y > 44, -900, 25))
    heart = blob((-28, 22, 40), (54, 44, 50))
    put(heart < 1, np.where(heart < 0.5, 215, 105), "heart")
    put(((x + 20) ** 2 + (y + 34) ** 2 < 13**2) & (z < 105), 260, "aorta")
    arch = (np.hypot(y + 2, z - 100) - 32) ** 2 + (x + 14) ** 2 < 13**2
    put(arch & (z > 96), 260, "aorta")
    spine, disc = x**2 + (y + 62) ** 2 < 24**2, np.mod(z, 34) < 7
    put(spine, np.where(disc, 80, np.where(x**2 + (y + 62) ** 2 < 20**2, 230, 520)), "bones")
    back = (np.abs(x) < 6) & (y < -84) & (y > -112) & ~disc & muscle | (np.abs(x) < 34) & (np.abs(y + 88) < 6) & ~disc
    put(back, 420, "bones")
    put(x**2 + (y + 92) ** 2 < 9**2, 25)
    centre = tuple(np.array((88, 5, -55)) + rng.normal(0, 9, 3))
    put((blob(centre, (17, 16, 18)) + 0.35 * fine < 1) & liver, 55, "tumour")
    table = (np.abs(grid[1] + 114 - 0.0006 * grid[0] ** 2) < 2.5) & (np.abs(grid[0]) < 170) & ~body
    put(table, -300)
    hu = gaussian_filter(hu, 0.6) + gaussian_filter(30 * rng.standard_normal(shape, np.float32), 0.7)
    return np.rint(hu.clip(-1024, 3071)).astype(np.int16), label


def _smooth(rng: np.random.Generator, shape: tuple[int, ...], cells: int) -> np.ndarray:
    """Return smooth noise of mean 0 and deviation 1, so many cells along the longest axis."""
    coarse = tuple(max(4, round(cells * n / max(shape))) + 1 for n in shape)
    values = rng.standard_normal(coarse, np.float32)
    for n, k in zip(shape, coarse, strict=True):  # interpolate along one axis after the other: a small matrix each
        values = np.tensordot(values, zoom(np.eye(k, dtype=np.float32), (n / k, 1), order=3), (0, 1))
    return (values - values.mean()) / values.std()


def _ball(shape: tuple[int, ...], centre: np.ndarray, radius: float) -> np.ndarray:
    waves = (np.exp(-((np.arange(n) - c) ** 2) / (2 * radius**2)) for n, c in zip(shape, centre, strict=True))
    x, y, z = (wave.astype(np.float32) for wave in waves)
    return x[:, None, None] * y[:, None] * z


def _place(rng: np.random.Generator, white: np.ndarray) -> np.ndarray:
    places = np.argwhere(white[::4, ::4, 24:-12:4] > 0.9)
    return places[rng.integers(len(places))] * 4 + (0, 0, 24)


def _write(folder: Path, name: str, arrays: object, affine: np.ndarray) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    item = {key: str(folder / f"{name}{'' if key == 'image' else '_seg'}.nii.gz") for key in KEYS}
    for path, array in zip(item.values(), arrays, strict=True):
        nib.save(nib.Nifti1Image(array, affine), path)
        os.utime(path, (_WRITTEN, _WRITTEN))
    return item
