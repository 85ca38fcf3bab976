"""Cases 22, 23 and 27 of ../shared/cases.md."""

from __future__ import annotations

import struct
from pathlib import Path

import monai.data
import numpy as np
import pytest
import torch
from monai.transforms import Lambda

from tests.strategies import assert_same
from tests.training.helpers import bytes_under, ct_pipeline, entries, loading, stored_arrays
from zcache import PersistentDataset


def test_case_22_an_item_is_returned_before_its_write_ends(volumes, tmp_path, gate):
    ds = PersistentDataset(volumes, ct_pipeline(), tmp_path)
    items = [ds[i] for i in range(4)]  # all four returned: the two writers have not ended one yet, and two items wait
    assert gate.begun.acquire(timeout=60)
    assert gate.begun.acquire(timeout=60)
    assert not gate.begun.acquire(blocking=False)
    assert (ds.stats.stored, ds.stats.misses) == (0, 4)
    assert not entries(tmp_path)
    for i in range(4):  # what is on its way is served from memory
        assert_same(items[i], ds[i])
    assert ds.stats.inflight_hits == 4
    gate.set()
    ds.flush()
    assert (ds.stats.stored, len(entries(tmp_path))) == (4, 4)
    for i in range(4):
        assert_same(items[i], ds[i])
    assert ds.stats.hits == 4


def sizes(data, steps, tmp_path) -> tuple[int, int, int]:
    """Bytes of the sources, of zcache's files and of MONAI's."""
    with PersistentDataset(data, steps, tmp_path / "ours") as ours:
        items = list(ours)
    theirs = monai.data.PersistentDataset(data, steps, tmp_path / "theirs", track_meta=True)
    for item, other in zip(items, theirs, strict=True):
        assert torch.equal(item["image"], other["image"])
        assert torch.equal(item["label"], other["label"])
    sources = sum(Path(path).stat().st_size for item in data for path in item.values())
    assert ours.stats.stored_bytes == sum(bytes_under(e) for e in entries(tmp_path / "ours"))
    return sources, bytes_under(tmp_path / "ours"), bytes_under(tmp_path / "theirs")


def test_case_23_a_windowed_ct_takes_less_than_its_nifti_and_a_tenth_of_monais_cache(shared_data, tmp_path):
    data = [{"image": str(shared_data / "ct_aorta.nii.gz"), "label": str(shared_data / "ct_aorta_seg.nii.gz")}]
    sources, ours, theirs = sizes(data, ct_pipeline(), tmp_path)
    assert ours <= 0.6 * sources
    assert ours <= theirs / 10


def test_case_23_generated_volumes_stay_small_too(volumes, tmp_path):
    _, ours, theirs = sizes(volumes, ct_pipeline(), tmp_path)
    assert ours <= theirs / 4


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_case_27_the_blosc_header_says_the_stored_item_size(codec, volumes, tmp_path):
    rng = torch.Generator().manual_seed(0)
    more = {
        "double": torch.randn(40, 41, 42, generator=rng, dtype=torch.float64),
        "float": torch.randn(40, 41, 42, generator=rng),
        "long": torch.randint(-(2**40), 2**40, (30, 30, 30), generator=rng),
        "complex": torch.randn(20, 21, 22, generator=rng, dtype=torch.complex128),
        "bool": torch.randint(0, 2, (64, 65, 66), generator=rng).bool(),
        "half": torch.randn(40, 41, 42, generator=rng).half(),
    }
    with PersistentDataset(
        volumes[:1], [*loading(), Lambda(lambda d: {**d, **more})], tmp_path, codec=codec, hash_transform=_key
    ) as ds:
        ds[0]
    seen = {}
    for name, array in stored_arrays(tmp_path).items():
        shard = next(p for p in (tmp_path / "cache.zarr" / name / "c").rglob("0") if p.is_file())
        data = shard.read_bytes()
        n_chunks = int(np.prod([-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)]))
        index = np.frombuffer(data[-16 * n_chunks - 4 : -4], "<u8").reshape(-1, 2)
        offsets = [int(offset) for offset, nbytes in index if nbytes != 2**64 - 1]
        assert offsets
        for offset in offsets:
            _, _, _, typesize, nbytes, _, _ = struct.unpack_from("<BBBBIII", data, offset)
            assert typesize == array.dtype.itemsize
            assert nbytes == int(np.prod(array.chunks)) * array.dtype.itemsize
        seen[name.removesuffix("/0").split("/")[-1]] = array.dtype.str
    assert seen == {
        "image": "<i2",
        "label": "|u1",
        "double": "<f8",
        "float": "<f4",
        "long": "<i8",
        "complex": "<c16",
        "bool": "|b1",
        "half": "<f2",
    }


def _key(transforms):
    return b"fixed"
