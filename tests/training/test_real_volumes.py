"""Every volume of ../shared/data, as MONAI loads it: the bits after caching, and how small it is stored."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import EnsureChannelFirstd, LoadImaged

from tests.strategies import assert_same
from tests.training.helpers import bytes_under, entries, plain, stored_arrays
from zcache import PersistentDataset

STORED = {
    "ct_aorta": "<i2",
    "ct_aorta_seg": "|u1",
    "ct_torso_3mm": "<i2",
    "ct_torso_3mm_seg": "|u1",
    "mr_torso_3mm": "<i2",
    "mr_torso_3mm_seg": "|u1",
    "mr_t1_head": "|u1",
    "mr_t2_head_int16": "<u2",
    "ct_angio_scaled_uint8": "|u1",
    "mr_pcasl_4d_float32": "<u2",
}


def test_every_volume_is_named_here(shared_data):
    assert {p.name.removesuffix(".nii.gz") for p in shared_data.glob("*.nii.gz")} == STORED.keys()


def check(path, dtype, tmp_path):
    data, steps = [{"image": str(path)}], [LoadImaged("image"), EnsureChannelFirstd("image")]
    (expected,) = plain(data, steps)
    with PersistentDataset(data, steps, tmp_path, on_error="raise") as ds:
        miss = ds[0]
        ds.flush()
        hit = ds[0]
        assert (ds.stats.hits, ds.stats.misses) == (1, 1)
    assert type(hit["image"]) is MetaTensor
    assert hit["image"].dtype is torch.float32
    assert_same(expected, miss)
    assert_same(expected, hit)
    (array,) = stored_arrays(tmp_path).values()
    assert array.dtype.str == dtype
    assert array.shape == tuple(expected["image"].shape)
    return array, hit["image"], bytes_under(entries(tmp_path)[0])


@pytest.mark.parametrize("name", STORED)
def test_a_real_volume_comes_back_bit_for_bit_and_is_stored_narrow(name, shared_data, tmp_path):
    path = shared_data / f"{name}.nii.gz"
    array, image, nbytes = check(path, STORED[name], tmp_path)
    assert nbytes < image.numel() * array.dtype.itemsize  # narrow, and compressed on top
    if name != "ct_angio_scaled_uint8":  # there the codes stand for other values
        assert np.array_equal(array[...], image.numpy())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int16 noise", "<i2"),
        ("labels", "|u1"),
        ("scaled uint8", "|u1"),
        ("4-D integral floats", "<u2"),
        ("floats", "<f4"),
    ],
)
def test_a_generated_volume_comes_back_bit_for_bit_and_is_stored_narrow(kind, dtype, tmp_path):
    """The same paths as the real volumes, on any machine."""
    rng = np.random.default_rng(0)
    shape = (52, 48, 20, 4) if kind.startswith("4-D") else (60, 50, 40)
    data = {
        "int16 noise": lambda: rng.normal(0, 300, shape).clip(-1024, 3071).astype(np.int16),
        "labels": lambda: (rng.random(shape) > 0.99).astype(np.uint8) * 23,
        "scaled uint8": lambda: rng.integers(0, 256, shape, np.uint8),
        "4-D integral floats": lambda: rng.integers(0, 2641, shape).astype(np.float32),
        "floats": lambda: rng.normal(size=shape).astype(np.float32),
    }[kind]()
    nifti = nib.Nifti1Image(data, np.diag([-2.0, -2.0, 3.0, 1.0]))
    if kind == "scaled uint8":
        nifti.header.set_slope_inter(2.2086, -3.5)
    nib.save(nifti, tmp_path / "volume.nii.gz")
    check(tmp_path / "volume.nii.gz", dtype, tmp_path / "c")
