"""Fixtures shared by all tests: volumes, real ones where they are at hand; warnings; counts of what was tried."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

_TALLY = "tally/"

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def memory_dir(tmp_path_factory) -> Iterator[Path]:
    """Keep apart from the memory of other jobs of this user."""
    path = tmp_path_factory.mktemp("memory")
    before = os.environ.get("ZCACHE_MEMORY_DIR")
    os.environ["ZCACHE_MEMORY_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["ZCACHE_MEMORY_DIR"]
    else:
        os.environ["ZCACHE_MEMORY_DIR"] = before


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real volumes (see ../shared/data/README.md), or a skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"the real volumes are not here: no folder {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def volumes(tmp_path_factory) -> list[dict[str, str]]:
    """Four generated CT-like volumes with labels as .nii.gz: int16 noise, uint8 labels, an LPS affine with shear."""
    import nibabel as nib  # noqa: PLC0415 - most tests need no volume

    folder = tmp_path_factory.mktemp("volumes")
    items = []
    for i in range(4):
        rng = np.random.default_rng(i)
        shape = (40, 36 + i, 30)
        ball = sum(
            (np.linspace(-1, 1, n) ** 2).reshape([-1 if a == b else 1 for b in range(3)]) for a, n in enumerate(shape)
        )
        label = (ball < 0.6).astype(np.uint8) + (ball < 0.2)
        image = np.where(ball < 0.9, rng.normal(60 * label, 40), -1000).astype(np.int16)
        affine = np.array([[-1.5, 0.1, 0, 30], [0, -1.4, 0, 20 + i], [0, 0, 2.0, -10], [0, 0, 0, 1]])
        item = {"image": str(folder / f"image{i}.nii.gz"), "label": str(folder / f"label{i}.nii.gz")}
        nib.save(nib.Nifti1Image(image, affine), item["image"])
        nib.save(nib.Nifti1Image(label.astype(np.uint8), affine), item["label"])
        items.append(item)
    return items


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Record every warning of the test, the repeated ones too, in place of failing on the first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.fixture
def no_warnings(capfd) -> Iterator[None]:
    """Fail on a warning or a traceback that any process wrote to stderr; pytest turns those of this one into errors."""
    yield
    err = capfd.readouterr().err
    assert "Warning" not in err, err
    assert "Traceback" not in err, err


@pytest.fixture
def tally(request, record_property):
    """Count outcomes by name; the sums of a folder's tests are printed at the end, for docs/reliability.md.

    They travel with the report of a test's end, from the processes of pytest-xdist too.
    """
    counts: Counter[str] = Counter()
    yield counts
    for what, n in counts.items():
        record_property(f"{_TALLY}{request.path.parent.name}/{what}", n)


def pytest_terminal_summary(terminalreporter):
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                for name, n in report.user_properties:
                    if name.startswith(_TALLY):
                        folder, what = name.removeprefix(_TALLY).split("/", 1)
                        totals[folder][what] += n
    for folder, counts in sorted(totals.items()):
        terminalreporter.write_line(f"{folder}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()) if n))
