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
from zcache.inspection.palette import COLOURS
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


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def parts(figure):
    """The slices, the histogram and the legend of a figure."""
    slices = [ax for ax in figure.axes if ax.images]
    histogram = [ax for ax in figure.axes if ax.lines and not ax.images]
    legend = [ax for ax in figure.axes if ax not in slices and ax not in histogram]
    return slices, histogram, legend


def test_three_planes_with_a_label_over_them(tmp_path):
    image = scan()
    label = (image > 400).to(torch.uint8)
    entry = entry_of(tmp_path, {"image": image, "label": label})
    figure = entry.plot()
    slices, _, _ = parts(figure)
    assert [ax.get_title() for ax in slices] == ["sagittal  9 of 20", "coronal  11 of 24", "axial  8 of 16"]
    canonical = nib.as_closest_canonical(nib.Nifti1Image(image[0].numpy(), AFFINE))
    expected = np.asarray(canonical.dataobj)[:, :, 8].T[::-1, ::-1]
    axial = slices[2]
    assert np.array_equal(axial.images[0].get_array(), expected)
    box = axial.get_position()
    inches = figure.get_size_inches()
    proportion = box.height * inches[1] / (box.width * inches[0])
    assert proportion == pytest.approx(24 * np.hypot(0.1, 1.4) / (20 * 1.5))
    assert texts(axial)[:4] == ["R", "L", "A", "P"]
    over = axial.images[1].get_array()
    assert np.array_equal(over[..., 3] > 0, expected > 400)
    assert rendered(figure).startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [len(ax.images) for ax in parts(entry.plot(label=False))[0]] == [1, 1, 1]
    assert "pyplot" not in dir(mpl) or not mpl.pyplot.get_fignums()


def test_the_scale_is_in_millimetres(tmp_path):
    for i, (affine, length) in enumerate([(AFFINE, 10), (np.diag([10.0, 10, 10, 1]), 50)]):
        slices, _, _ = parts(entry_of(tmp_path / str(i), {"image": scan(affine)}).plot())
        [bar] = [line for ax in slices for line in ax.lines]
        spacing = np.linalg.norm(affine[:3, 1 if bar.axes.get_title().startswith("sag") else 0])
        assert np.ptp(bar.get_xdata()) * spacing == pytest.approx(length)
        assert f"{length} mm" in texts(bar.axes)
    slices, _, _ = parts(entry_of(tmp_path / "none", {"image": ct_like((20, 24, 16))}).plot())
    assert not any(ax.lines for ax in slices)  # nobody says how large a voxel is


def test_the_window(tmp_path):
    entry = entry_of(tmp_path, {"image": scan() - 500})
    slices, [histogram], _ = parts(entry.plot(window=(-100, 90)))
    assert {ax.images[0].get_clim() for ax in slices} == {(-100.0, 90.0)}
    assert [line.get_xdata()[0] for line in histogram.lines] == [-100.0, 90.0]
    by_name = parts(entry.plot(window="soft tissue"))[0][0].images[0]
    assert by_name.get_clim() == (-150.0, 250.0)
    default = parts(entry.plot())
    drawn = np.concatenate([np.asarray(ax.images[0].get_array()).ravel() for ax in default[0]])
    assert default[0][0].images[0].get_clim() == pytest.approx(np.percentile(drawn, (1, 99)))
    written = [text.get_text() for text in entry.plot(window="bone").texts]
    assert "window −500 to 1300 (bone) · these slices, log scale" in written
    with pytest.raises(zcache.CacheConfigError, match="Hounsfield"):
        entry_of(tmp_path / "mr", {"image": scan() * 0 + 5}).plot(window="brain")


def test_the_histogram_is_that_of_the_slices_drawn(tmp_path):
    entry = entry_of(tmp_path, {"image": scan()})
    slices, [histogram], _ = parts(entry.plot(window=(-2000, 2000)))
    values = np.concatenate([ax.images[0].get_array().ravel() for ax in slices])
    heights, edges, _ = histogram.patches[0].get_data()
    assert np.expm1(heights) == pytest.approx(np.histogram(values, edges)[0])
    assert edges[[0, -1]].tolist() == [-2000, 2000]


def test_the_legend_has_the_classes_of_the_whole_label(tmp_path):
    label = torch.zeros(1, 20, 24, 16)
    label[0, 0, 0, :3] = 3  # in none of the slices drawn
    label[0, :10] = 1
    label[0, 0, 0, :3] = 3
    entry = entry_of(tmp_path, {"image": scan(np.diag([10.0, 10, 10, 1])), "label": label})
    figure = entry.plot()
    _, _, [legend] = parts(figure)
    assert texts(legend) == ["1", "3,837 voxels", "3", "3 voxels"]
    assert "label: 2 classes in all" in [text.get_text() for text in figure.texts]
    known = MetaTensor(label, affine=torch.diag(torch.tensor([10.0, 10, 10, 1])))
    entry = entry_of(tmp_path / "known", {"image": scan(np.diag([10.0, 10, 10, 1])), "label": known})
    _, _, [legend] = parts(entry.plot())
    assert texts(legend) == ["1", "3,837 ml", "3", "3 ml"]
    assert [np.array(p.get_facecolor()[:3]) * 255 for p in legend.patches] == [
        pytest.approx(colour) for colour in COLOURS[[0, 2]].astype(float)
    ]
    many = torch.arange(20 * 24 * 16).reshape(1, 20, 24, 16) % 200
    _, _, [legend] = parts(entry_of(tmp_path / "many", {"image": scan(), "label": many}).plot())
    assert len(legend.patches) < 20
    assert texts(legend)[-1] == f"and {199 - len(legend.patches)} more"


def test_a_mosaic(tmp_path):
    image = scan(np.diag([1.0, -1, 1, 1]), (1, 20, 24, 40))
    entry = entry_of(tmp_path, {"image": image, "label": (image > 400).to(torch.uint8)})
    slices, _, _ = parts(entry.plot(layout="mosaic"))
    canonical = np.asarray(nib.as_closest_canonical(nib.Nifti1Image(image[0].numpy(), image.affine.numpy())).dataobj)
    indices = [int(ax.texts[-2 if i == 0 else -1].get_text().partition(" ")[0]) for i, ax in enumerate(slices)]
    assert len(slices) == 24
    assert indices[:3] == [0, 2, 4]
    for index, ax in zip(indices, slices, strict=True):
        assert np.array_equal(ax.images[0].get_array(), canonical[:, :, index].T[::-1, ::-1])
        assert len(ax.images) == 2
    assert texts(slices[0])[:4] == ["R", "L", "A", "P"]
    assert texts(slices[1]) == ["2"]
    with pytest.raises(zcache.CacheConfigError, match="layout='grid' is neither 'planes' nor 'mosaic'"):
        entry.plot(layout="grid")


@pytest.mark.parametrize("layout", ["planes", "mosaic"])
@pytest.mark.parametrize("shape", [(1, 20, 24, 16), (1, 120, 20, 10), (1, 10, 20, 300), (1, 1, 2, 200), (1, 200, 2, 1)])
def test_nothing_overlaps(tmp_path, shape, layout):
    image = scan(np.diag([1.0, 1, 2, 1]), shape)
    label = (image > 400).to(torch.uint8)
    figure = entry_of(tmp_path, {"image": image, "label": label}).plot(layout=layout)
    figure.canvas.draw()
    boxes = [ax.get_window_extent() for ax in figure.axes]
    for i, a in enumerate(boxes):
        assert 0 <= a.x0 <= a.x1 <= figure.bbox.width
        assert 0 <= a.y0 <= a.y1 <= figure.bbox.height
        assert not any(a.overlaps(b) for b in boxes[i + 1 :])
    above = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()] + [
        text.get_window_extent() for text in figure.texts
    ]
    for i, a in enumerate(above):
        assert not any(a.overlaps(b) for b in [*boxes, *above[i + 1 :]])
        assert a.x1 <= figure.bbox.width


@pytest.mark.parametrize("layout", ["planes", "mosaic"])
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
def test_whatever_is_an_image(tmp_path, item, layout):
    entry = entry_of(tmp_path, item)
    assert rendered(entry.plot(layout=layout)).startswith(b"\x89PNG")
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
