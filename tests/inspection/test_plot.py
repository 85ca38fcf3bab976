"""Figures and NIfTI files of entries."""

from __future__ import annotations

import io

import matplotlib as mpl
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

import zcache
from tests.support import ct_like, key, same_bits
from zcache.inspection.thumbnails import grey, png
from zcache.training.leaves import torch_leaf_codecs

AFFINE = np.array([[-1.5, 0.1, 0, 30], [0, -1.4, 0, 20], [0, 0, 4.0, -10], [0, 0, 0, 1]])


def entry_of(folder, item):
    with zcache.Cache(folder / "cache", leaf_codecs=torch_leaf_codecs(), on_error="raise") as cache:
        cache.put(key(1), item, {"source": ["/data/$a_$.nii.gz"]})
    return zcache.open_cache(folder / "cache")[key(1)]


def scan(affine=AFFINE, shape=(1, 20, 24, 16)):
    return MetaTensor(torch.from_numpy(ct_like(shape)), affine=torch.from_numpy(affine))


def rendered(figure) -> bytes:
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png", dpi=20)
        return buffer.getvalue()


def test_three_planes_with_a_label_over_them(tmp_path):
    image = scan()
    label = (image > 400).to(torch.uint8)
    entry = entry_of(tmp_path, {"image": image, "label": label})
    figure = entry.plot()
    assert [ax.get_title() for ax in figure.axes] == ["sagittal", "coronal", "axial"]
    canonical = nib.as_closest_canonical(nib.Nifti1Image(image[0].numpy(), AFFINE))
    expected = np.asarray(canonical.dataobj)[:, :, 8].T[::-1, ::-1]
    axial = figure.axes[2]
    assert np.array_equal(axial.images[0].get_array(), expected)
    assert axial.get_aspect() == pytest.approx(np.hypot(0.1, 1.4) / 1.5)
    assert [text.get_text() for text in axial.texts] == ["R", "L", "A", "P"]
    over = axial.images[1].get_array()
    assert np.array_equal(over[..., 3] > 0, expected > 400)
    assert rendered(figure).startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [len(ax.images) for ax in entry.plot(label=False).axes] == [1, 1, 1]
    assert "pyplot" not in dir(mpl) or not mpl.pyplot.get_fignums()


@pytest.mark.parametrize(
    "item",
    [
        {"image": scan(np.zeros((4, 4)))},
        {"image": scan(np.full((4, 4), np.nan))},
        {"image": np.random.default_rng(0).random((90, 80))},
        {"image": np.random.default_rng(0).integers(0, 255, (3, 90, 80)).astype(np.uint8)},
        {"image": scan(shape=(5, 20, 24, 16)).float() / 3},
        {"image": torch.linspace(0, 1, 16_000, dtype=torch.bfloat16).reshape(20, 40, 20)},
        {"image": torch.full((1, 20, 30, 20), torch.nan)},
        {"image": np.random.default_rng(0).random((20, 20, 20)) > 0.5},
        {"image": np.random.default_rng(0).random((20, 20, 20)) * 1j},
        {"image": np.ones((20, 20, 20), ">i2")},
        {"image": torch.ones(4, 5)},
        {"image": torch.ones(1, 200, 2)},
        {"label": torch.ones(1, 20, 30, 20)},
        {"pair": [scan(), scan()]},
    ],
)
def test_whatever_is_an_image(tmp_path, item):
    entry = entry_of(tmp_path, item)
    assert rendered(entry.plot()).startswith(b"\x89PNG")
    assert "data:image/png" in entry._repr_html_()
    assert nib.load(entry.to_nifti(tmp_path / "out.nii.gz")).shape[1] > 1


def test_what_is_no_image(tmp_path):
    entry = entry_of(
        tmp_path, {"x": np.zeros(5000), "text": np.array([["a", "b"]]), "image": scan(), "seg": torch.ones(1, 9, 9, 9)}
    )
    with pytest.raises(zcache.EntryNotFoundError, match=r"no image 'x': it has 'image', 'seg'"):
        entry.plot("x")
    with pytest.raises(zcache.CacheConfigError, match=r"the label 'seg' has the extents \(9, 9, 9\)"):
        entry.plot(label="seg")
    with pytest.raises(zcache.CacheConfigError, match="channel=1"):
        entry.plot(channel=1)
    with pytest.raises(zcache.CacheConfigError, match=r"should end in .nii.gz"):
        entry.to_nifti(tmp_path / "a.mha")
    assert entry_of(tmp_path / "other", {"n": 1})._repr_html_().count("<img") == 0


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"])
def test_nifti_has_the_values_and_the_affine(tmp_path, dtype):
    array = ct_like((1, 20, 24, 16)).clip(0, 200).astype(dtype)
    entry = entry_of(tmp_path, {"image": MetaTensor(torch.from_numpy(array), affine=torch.from_numpy(AFFINE))})
    loaded = nib.load(entry.to_nifti(tmp_path / "out.nii.gz"))
    assert np.array_equal(np.asarray(loaded.dataobj), array[0])
    assert loaded.affine == pytest.approx(AFFINE)
    assert loaded.header.get_zooms() == pytest.approx(nib.affines.voxel_sizes(AFFINE))
    if dtype in ("uint8", "int16", "int32", "float32", "float64"):
        assert same_bits(np.asarray(loaded.dataobj).astype(dtype), array[0])
        assert loaded.get_data_dtype() == dtype


def test_nifti_of_channels_and_of_what_cannot_be_inverted(tmp_path):
    image = scan(np.diag([2.0, 0, 3, 1]), (3, 10, 12, 14))
    loaded = nib.load(entry_of(tmp_path, {"image": image}).to_nifti(tmp_path / "out.nii"))
    assert loaded.shape == (10, 12, 14, 3)
    assert np.array_equal(np.asarray(loaded.dataobj)[..., 2], image[2].numpy())
    assert np.array_equal(loaded.header.get_sform(), np.diag([2.0, 0, 3, 1]))


def test_png():
    pil = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 255, (7, 5)).astype(np.uint8)
    assert np.array_equal(np.asarray(pil.open(io.BytesIO(png(image)))), image)
    colours = np.random.default_rng(0).integers(0, 255, (7, 5, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(pil.open(io.BytesIO(png(colours)))), colours)
    assert grey(np.array([-1.0, 0, 0.5, 9, np.nan]), (0.0, 1.0)).tolist() == [0, 0, 127, 255, 0]
