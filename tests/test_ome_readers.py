"""Entries as the tools of the OME-Zarr world see them: validated, and read with axes, places and every label."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from monai.transforms import Compose, CropForegroundd, EnsureChannelFirstd, LoadImaged, Orientationd

import zcache

KEYS = ("image", "label")
ome_zarr_models = pytest.importorskip("ome_zarr_models.v05")
ome_reader = pytest.importorskip("ome_zarr.reader")
ome_io = pytest.importorskip("ome_zarr.io")
ngff_zarr = pytest.importorskip("ngff_zarr")


@pytest.fixture(scope="session")
def oblique(tmp_path_factory) -> dict[str, str]:
    """A volume that lies askew, and its label, as .nii.gz."""
    import nibabel as nib  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("oblique")
    affine = np.eye(4)
    affine[:3, :3] = nib.eulerangles.euler2mat(0.3, -0.2, 0.15) @ np.diag([-0.8, -0.8, 2.5])
    affine[:3, 3] = [91.5, 120.25, -700.125]
    rng = np.random.default_rng(0)
    image = rng.normal(0, 300, (44, 40, 36)).astype(np.float32)
    label = (rng.integers(0, 5, image.shape) * (np.indices(image.shape)[0] > 9)).astype(np.uint8)
    for name, array in (("image", image), ("label", label)):
        nib.Nifti1Image(array, affine).to_filename(folder / f"{name}.nii.gz")
    return {name: str(folder / f"{name}.nii.gz") for name in KEYS}


def cached(folder: Path, item: dict[str, str], *steps) -> tuple[Path, dict]:
    """The entry of an item, and the item as MONAI computed it."""
    pipeline = Compose([LoadImaged(list(item)), EnsureChannelFirstd(list(item)), *steps])
    with zcache.PersistentDataset([item], pipeline, folder, on_error="raise") as dataset:
        value = dataset[0]
    [entry] = (p for p in (folder / "cache.zarr").iterdir() if p.is_dir())
    return entry, value


def expected(value, axes: str) -> tuple[list[float], list[float]]:
    """Scale and translation: mm per voxel, and the offset along the axes, which a NIfTI file makes askew by 1e-7."""
    affine = value.affine.numpy()
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    assert axes[0] == "c"
    return [1, *lengths], [0, *(affine[:3, :3] / lengths).T @ affine[:3, 3]]


def transforms_of(ome: dict) -> tuple[list[float], list[float]]:
    [level] = ome["multiscales"][0]["datasets"]
    scale, translation = level["coordinateTransformations"]
    return scale["scale"], translation["translation"]


def assert_valid(entry: Path) -> None:
    """By the models of the specification, and by its own JSON schemas."""
    image = ome_zarr_models.Image.from_zarr(zarr.open_group(entry, mode="r"))
    for path in entry.rglob("zarr.json"):
        attributes = json.loads(path.read_text())["attributes"]
        if "multiscales" in attributes.get("ome", {}):
            model = "label" if "image-label" in attributes["ome"] else "image"
            ngff_zarr.validate(attributes, version="0.5", model=model)
    if (entry / "labels").is_dir():
        assert (
            image.labels.label_paths
            == json.loads((entry / "labels/zarr.json").read_text())["attributes"]["ome"]["labels"]
        )
        ome_zarr_models.Labels.from_zarr(zarr.open_group(entry / "labels", mode="r"))
        for name in image.labels.label_paths:
            ome_zarr_models.ImageLabel.from_zarr(zarr.open_group(entry / "labels" / name, mode="r"))


def assert_read(entry: Path, value: dict) -> None:
    """Image and label, with both readers."""
    assert_valid(entry)
    nodes = {Path(str(node.zarr.path)).name: node for node in ome_reader.Reader(ome_io.parse_url(str(entry)))()}
    assert set(nodes) == {entry.name, "labels", "label"}
    for place, name in ((entry, "image"), (entry / "labels/label", "label")):
        node = nodes[place.name]
        read = ngff_zarr.from_ome_zarr(str(place)).images[0]
        axes = "".join(axis["name"] for axis in node.metadata["axes"])
        assert sorted(axes[1:]) == ["x", "y", "z"]
        assert tuple(read.dims) == tuple(axes)
        assert {axis.get("unit") for axis in node.metadata["axes"][1:]} == {"millimeter"}
        scale, translation = expected(value[name], axes)
        [[first, second]] = node.metadata["coordinateTransformations"]
        for found in (first["scale"], [read.scale[axis] for axis in axes]):
            assert found == pytest.approx(scale)
        for found in (second["translation"], [read.translation[axis] for axis in axes]):
            assert found == pytest.approx(translation, rel=1e-5, abs=1e-4)
        for found in (np.asarray(node.data[0]), np.asarray(read.data)):
            assert found.shape == value[name].shape
            if name == "label":
                assert found.dtype == np.uint8
                assert np.array_equal(found, value[name].numpy())


def test_an_oblique_volume_and_its_label(oblique, tmp_path):
    entry, value = cached(tmp_path, oblique)
    assert_read(entry, value)
    ome = json.loads((entry / "zarr.json").read_text())["attributes"]["ome"]
    assert [image["name"] for image in ome["multiscales"]] == ["image"]
    assert [axis["name"] for axis in ome["multiscales"][0]["axes"]] == ["c", "x", "y", "z"]
    values = ngff_zarr.from_ome_zarr(str(entry)).images[0].data
    assert np.asarray(values).tobytes() == value["image"].numpy().tobytes()


def test_what_is_cropped_stays_where_it_was(oblique, tmp_path):
    """Each voxel of a crop has the coordinates that it has in the whole volume."""
    whole, _ = cached(tmp_path / "whole", oblique)
    part, value = cached(tmp_path / "part", oblique, CropForegroundd(KEYS, "label", allow_smaller=True))
    assert_read(part, value)
    read = [json.loads((entry / "zarr.json").read_text())["attributes"]["ome"] for entry in (whole, part)]
    (scale, before), (same, after) = map(transforms_of, read)
    assert same == pytest.approx(scale)
    assert np.subtract(after, before) == pytest.approx([0, 10 * scale[1], 0, 0], abs=1e-4)


@pytest.mark.parametrize(("codes", "axes"), [("RAS", "xyz"), ("LPS", "xyz"), ("SLA", "zxy"), ("PIR", "yzx")])
def test_volumes_of_any_orientation(oblique, tmp_path, codes, axes):
    entry, value = cached(
        tmp_path, oblique, Orientationd(KEYS, axcodes=codes, labels=(("L", "R"), ("P", "A"), ("I", "S")))
    )
    assert_read(entry, value)
    assert zarr.open_array(entry / "image", mode="r").metadata.dimension_names == ("c", *axes)


@pytest.mark.parametrize("name", ["ct_aorta", "ct_torso_3mm", "mr_torso_3mm"])
def test_real_scans_with_labels(shared_data, tmp_path, name):
    item = {"image": str(shared_data / f"{name}.nii.gz"), "label": str(shared_data / f"{name}_seg.nii.gz")}
    entry, value = cached(tmp_path, item)
    assert_read(entry, value)


@pytest.mark.parametrize("name", ["ct_angio_scaled_uint8", "mr_pcasl_4d_float32", "mr_t1_head", "mr_t2_head_int16"])
def test_real_scans_without_labels(shared_data, tmp_path, name):
    entry, value = cached(tmp_path, {"image": str(shared_data / f"{name}.nii.gz")})
    assert_valid(entry)
    ome = json.loads((entry / "zarr.json").read_text())["attributes"]["ome"]
    scale, translation = expected(value["image"], "cxyz")
    assert transforms_of(ome)[0] == pytest.approx(scale)
    assert transforms_of(ome)[1] == pytest.approx(translation, rel=1e-5, abs=1e-4)
    read = ngff_zarr.from_ome_zarr(str(entry)).images[0]
    assert read.data.shape == value["image"].shape


def test_a_cache_written_without_monai_is_valid_too(tmp_path):
    rng = np.random.default_rng(0)
    item = {
        "photo": rng.integers(0, 255, (3, 90, 70), np.uint8),
        "slice_label": rng.integers(0, 3, (1, 90, 70)).astype("f4"),
        "volume": rng.standard_normal((40, 30, 20)),
        "mask": rng.integers(0, 2, (40, 30, 20)).astype(bool),
        "batch": rng.standard_normal((2, 1, 40, 30, 20)),
        "points": rng.standard_normal(5000),
    }
    with zcache.Cache(tmp_path, on_error="raise") as cache:
        cache.put(f"{1:032x}", item)
    entry = tmp_path / "cache.zarr" / f"{1:032x}"
    assert_valid(entry)
    ome = json.loads((entry / "zarr.json").read_text())["attributes"]["ome"]
    axes = {image["name"]: "".join(axis["name"] for axis in image["axes"]) for image in ome["multiscales"]}
    assert axes == {"volume": "xyz", "photo": "cyx", "mask": "xyz"}
    assert np.array_equal(zarr.open_group(entry, mode="r")["labels/slice_label/0"][...], item["slice_label"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ngff_zarr.from_ome_zarr(str(entry)).images[0].data.shape == (40, 30, 20)
