"""Entries in notebooks: what NiiVue is handed, what the sliders draw, and what is said where neither is installed."""

from __future__ import annotations

import io
import sys

import ipywidgets
import nibabel as nib
import numpy as np
import PIL.Image
import pytest
import torch
from ipyniivue import NiiVue
from monai.data import MetaTensor

import zcache
from tests.inspection.test_plot import AFFINE, entry_of, scan
from zcache.encoding.geometry import Geometry
from zcache.inspection.nifti import to_bytes
from zcache.inspection.palette import COLOURS
from zcache.inspection.slider import SliceViewer
from zcache.inspection.subjects import picked, picked_label
from zcache.inspection.thumbnails import grey


def pair(affine=AFFINE):
    image = scan(affine).float()
    return {"image": image, "label": (image > 400).float() * 2}


def loaded(data) -> nib.Nifti1Image:
    return nib.Nifti1Image.from_bytes(bytes(data))


def pixels(picture) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(picture.value)))


def sliders(entry, label=None, channel=0, window=None) -> SliceViewer:
    image = picked(entry, None)
    return SliceViewer(entry, image, picked_label(entry, image, label), channel, window)


def test_niivue_is_handed_image_and_label_in_memory(tmp_path):
    item = pair()
    widget = entry_of(tmp_path, item).view(window=(-10, 700))
    assert isinstance(widget, NiiVue)
    image, label = widget.volumes
    assert (image.name, image.colormap, image.cal_min, image.cal_max) == ("image.nii", "gray", -10.0, 700.0)
    assert np.array_equal(np.asarray(loaded(image.data).dataobj), item["image"][0].numpy())
    assert loaded(image.data).affine == pytest.approx(AFFINE)
    assert loaded(image.data).get_data_dtype() == np.int16  # half of what float32 would take to the browser
    assert np.array_equal(np.asarray(loaded(label.data).dataobj), item["label"][0].numpy())
    assert loaded(label.data).get_data_dtype() == np.uint8
    assert label.opacity == 0.5
    colours = np.reshape(label.colormap_label.lut, (-1, 4))
    assert colours[0, 3] == 0
    assert np.array_equal(colours[2, :3], COLOURS[1])
    widget.close()


def test_niivue_with_time_and_without_a_label(tmp_path):
    image = scan(shape=(5, 20, 24, 16)).float() / 3
    widget = entry_of(tmp_path, {"image": image, "label": torch.ones(1, 9, 9, 9)}).view(channel=3)
    [volume] = widget.volumes
    assert volume.frame_4d == 3
    assert np.array_equal(np.asarray(loaded(volume.data).dataobj)[..., 3], image[3].numpy())
    widget.close()


def test_niivue_and_labels_that_no_table_fits(tmp_path):
    image = scan()
    for i, (label, colormap) in enumerate([(torch.zeros(1, 20, 24, 16), "red"), ((image > 400) * 70_000, "red")]):
        widget = entry_of(tmp_path / str(i), {"image": image, "label": label}).view()
        assert widget.volumes[1].colormap == colormap
        assert widget.volumes[1].colormap_label is None
        widget.close()


@pytest.mark.parametrize("name", ["sagittal", "coronal", "axial"])
def test_a_slider_that_is_moved_draws_that_slice(tmp_path, name):
    item = pair()
    viewer = sliders(entry_of(tmp_path, item), label=False, window=(0, 800))
    world = ["sagittal", "coronal", "axial"].index(name)
    before = {view: picture.value for view, picture in viewer.pictures.items()}
    viewer.places[name].value = 3
    index = {0: 16, 1: 20, 2: 3}[world]  # two axes run against the world
    canonical = np.asarray(nib.as_closest_canonical(nib.Nifti1Image(item["image"][0].numpy(), AFFINE)).dataobj)
    expected = np.take(canonical, index, axis=world).T[::-1, ::-1]
    assert np.array_equal(pixels(viewer.pictures[name]), grey(expected, (0.0, 800.0)))
    changed = {view for view, picture in viewer.pictures.items() if picture.value != before[view]}
    assert changed == {name}
    assert (viewer.places[name].min, viewer.places[name].max) == (0, canonical.shape[world] - 1)


def test_the_sliders_begin_where_figures_do(tmp_path):
    entry = entry_of(tmp_path, pair())
    viewer = sliders(entry)
    drawn = [ax for ax in entry.plot().axes if ax.images]
    assert [f"{view}  {s.value} of {s.max + 1}" for view, s in viewer.places.items()] == [a.get_title() for a in drawn]
    assert tuple(viewer.window.value) == pytest.approx(drawn[0].images[0].get_clim())


def test_window_label_and_channel(tmp_path):
    image = scan(shape=(2, 20, 24, 16)).float() - 300
    entry = entry_of(tmp_path, {"image": image, "label": (image[:1] > 100).float()})
    viewer = sliders(entry, channel=1, window=(0, 100))
    axial = viewer.pictures["axial"]
    assert pixels(axial).shape[-1] == 3
    viewer.label.value = False
    plain = np.asarray(nib.as_closest_canonical(nib.Nifti1Image(image[1].numpy(), AFFINE)).dataobj)[:, :, 8].T[
        ::-1, ::-1
    ]
    assert np.array_equal(pixels(axial), grey(plain, (0.0, 100.0)))
    viewer.window.value = (-300, 300)
    assert np.array_equal(pixels(axial), grey(plain, (-300.0, 300.0)))
    viewer.channel.value = 0
    assert not np.array_equal(pixels(axial), grey(plain, (-300.0, 300.0)))
    buttons = [w for w in viewer.box.children[-1].children if isinstance(w, ipywidgets.Button)]
    assert [button.description for button in buttons] == ["brain", "soft tissue", "lung", "bone"]
    buttons[2].click()
    assert tuple(viewer.window.value) == (-1350.0, 150.0)
    viewer.label.value = True
    assert pixels(axial).shape[-1] == 3


def test_true_proportions(tmp_path):
    viewer = sliders(entry_of(tmp_path, {"image": scan(np.diag([1.0, 1, 4, 1]), (1, 20, 40, 16))}))
    sizes = {view: (p.layout.width, p.layout.height) for view, p in viewer.pictures.items()}
    assert sizes == {"sagittal": ("200px", "320px"), "coronal": ("100px", "320px"), "axial": ("100px", "200px")}


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_of_two_axes_have_no_places(tmp_path, dtype):
    data = np.random.default_rng(0).integers(0, 255, (3, 90, 80)).astype(dtype)
    widget = entry_of(tmp_path, {"image": data}).view()
    assert isinstance(widget, ipywidgets.VBox)
    viewer = sliders(zcache.open_cache(tmp_path / "cache").resolve(""))
    assert viewer.places == {}
    assert np.array_equal(pixels(viewer.pictures["image"]), np.moveaxis(data, 0, -1).astype(np.uint8))


@pytest.mark.parametrize(
    "item",
    [
        {"image": torch.full((1, 20, 30, 20), torch.nan)},
        {"image": np.random.default_rng(0).random((20, 20, 20)) > 0.5},
        {"image": np.random.default_rng(0).random((20, 20, 20)) * 1j},
        {"image": torch.ones(1, 20, 2, 200)},
        {"image": MetaTensor(torch.ones(1, 20, 20, 20), affine=torch.zeros(4, 4))},
    ],
)
def test_whatever_is_an_image(tmp_path, item):
    entry = entry_of(tmp_path, item)
    assert isinstance(entry.view(viewer="slices"), ipywidgets.VBox)
    assert isinstance(entry.view(viewer="niivue"), NiiVue)


def block(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    for room in ("niivue", "slider"):
        monkeypatch.delitem(sys.modules, f"zcache.inspection.{room}", raising=False)


def test_sliders_where_niivue_is_missing_and_a_sentence_where_both_are(tmp_path, monkeypatch):
    entry = entry_of(tmp_path, pair())
    block(monkeypatch, "ipyniivue")
    assert isinstance(entry.view(), ipywidgets.VBox)
    with pytest.raises(zcache.MissingExtraError, match=r"ipyniivue is not installed, .*'monai-zcache\[notebook\]'"):
        entry.view(viewer="niivue")
    block(monkeypatch, "ipyniivue", "ipywidgets")
    with pytest.raises(zcache.MissingExtraError, match=r"ipywidgets is not installed, .*'monai-zcache\[notebook\]'"):
        entry.view()


def test_mistakes(tmp_path):
    entry = entry_of(tmp_path, pair())
    with pytest.raises(zcache.CacheConfigError, match="viewer='vtk' is neither 'niivue' nor 'slices'"):
        entry.view(viewer="vtk")
    with pytest.raises(zcache.CacheConfigError, match="channel=1 is not one of the 1 channels"):
        entry.view(channel=1)
    with pytest.raises(zcache.EntryNotFoundError, match="no image 'ct'"):
        entry.view("ct")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.0, 255.0], "uint8"),
        ([-1.0, 300.0], "int16"),
        ([0.0, 40_000.0], "uint16"),
        ([0.0, 70_000.0], "float32"),
        ([0.5, 1.0], "float32"),
        ([np.nan, 1.0], "float32"),
    ],
)
def test_the_smallest_type_that_holds_the_values(tmp_path, values, dtype):
    data = np.resize(np.array(values, np.float32), (8, 8, 20))
    entry = entry_of(tmp_path, {"image": data})
    [place] = entry.places
    found = loaded(to_bytes(entry, place, Geometry(data.shape, (0, 1, 2), None, None)))
    assert found.get_data_dtype() == dtype
    assert np.array_equal(np.asarray(found.dataobj), data, equal_nan=True)
