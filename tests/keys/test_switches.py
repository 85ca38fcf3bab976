"""Switches of the process that count in every key."""

import subprocess
import sys

import monai.config
import monai.data
import pytest
import torch

from zcache.keys import switches


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    monai.data.set_track_meta(True)


def test_each_switch_by_name(monkeypatch):
    assert switches() == {}
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    monai.data.set_track_meta(False)
    monkeypatch.setattr(monai.config, "USE_META_DICT", True)
    monkeypatch.setattr(monai.config, "USE_COMPILED", True)
    monkeypatch.setenv("MONAI_TRACE_TRANSFORM", "0")
    monkeypatch.setenv("MONAI_DICOM_READER", "itk")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert switches() == {
            "torch.default_dtype": "torch.float64",
            "torch.default_device": "meta",
            "torch.autocast": "torch.bfloat16",
            "torch.float32_matmul_precision": "medium",
            "monai.track_meta": False,
            "monai.use_meta_dict": True,
            "monai.use_compiled": True,
            "MONAI_TRACE_TRANSFORM": "0",
            "MONAI_DICOM_READER": "itk",
        }


def test_a_device_for_a_while():
    with torch.device("meta"):
        assert switches() == {"torch.default_device": "meta"}
    assert switches() == {}


def test_neither_torch_nor_monai_is_imported_for_it():
    code = (
        "import sys; from zcache.keys import switches as s; print(s(), *(m in sys.modules for m in ('torch', 'monai')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{}", "False", "False"]
