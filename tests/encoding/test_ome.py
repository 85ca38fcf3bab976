"""What viewers are told of an entry: which arrays are images and labels, their axes, and where these lie."""

from __future__ import annotations

import base64
import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zcache.encoding.narrowing import narrow
from zcache.encoding.ome import Image, entry_metadata, find_images, is_label, label_groups
from zcache.encoding.orientation import orientation, origin

SHAPE = (1, 40, 50, 60)
SAGITTAL = np.array([[0, 0, 1, 5], [2, 0, 0, 6], [0, 2, 0, 7], [0, 0, 0, 1]])
OBLIQUE = np.array([[-0.7, 0.1, 0.05, 90], [0.1, 0.69, -0.2, -80], [0.02, 0.2, 2.4, -500], [0, 0, 0, 1]])
WORLDS = list(itertools.permutations(range(3)))


def inline(array: np.ndarray) -> dict:
    data = base64.b64encode(array.tobytes()).decode()
    return {"$ndarray": {"dtype": array.dtype.str, "shape": list(array.shape), "base64": data}}


def node(name: str, shape=SHAPE, dtype="<f4", affine=None, torch_dtype=None, spatial_ndim=None, **meta) -> dict:
    """The payload of an array: a MetaTensor if it has an affine."""
    data = {"data": {"dtype": dtype, "shape": list(shape), "array": name}}
    data |= {"dtype": torch_dtype} if torch_dtype else {}
    if affine is None:
        return {"$tensor": data} if torch_dtype else {"$ndarray": data["data"]}
    values = {"affine": inline(np.asarray(affine, np.float64)), **meta}
    said = {} if spatial_ndim is None else {"spatial_ndim": spatial_ndim}
    return {"$metatensor": {**data, "meta": values, "applied_operations": [], "is_batch": False, **said}}


def shape_of(part: dict) -> tuple[str, tuple[int, ...]]:
    ((_, body),) = part.items()
    ref = body.get("data", body)
    return ref["array"], tuple(ref["shape"])


def found_in(**parts) -> dict[str, Image]:
    return find_images(parts, dict(shape_of(part) for part in parts.values()))


def only(part: dict) -> Image:
    [image] = found_in(a=part).values()
    return image


# --- Where the first voxel lies ---------------------------------------------------------------------------------------


@given(
    st.permutations(range(3)),
    st.tuples(*[st.booleans()] * 3),
    st.tuples(*[st.floats(0.1, 9)] * 3),
    st.tuples(*[st.floats(-900, 900)] * 3),
)
def test_along_the_worlds_axes_coordinates_are_the_worlds_with_the_sign_of_the_axis(world, flips, steps, offset):
    affine = np.eye(4)
    affine[:3, :3] = 0
    affine[:3, 3] = offset
    for axis in range(3):
        affine[world[axis], axis] = steps[axis] * (-1 if flips[axis] else 1)
    expected = [offset[world[axis]] * (-1 if flips[axis] else 1) for axis in range(3)]
    assert origin(affine) == pytest.approx(expected)
    image = only(node("a", affine=affine))
    assert image.axes == "c" + "".join("xyz"[w] for w in world)
    assert image.scale == pytest.approx((1, *steps))
    assert image.translation == pytest.approx((0, *expected))


AFFINES = st.lists(st.floats(-9, 9, allow_subnormal=False), min_size=12, max_size=12)


@given(AFFINES, st.tuples(*[st.integers(0, 200)] * 3))
def test_what_is_cut_off_moves_the_origin_by_as_many_voxels(values, cut):
    """However oblique or sheared: image and label lie over each other whatever was cropped from either."""
    affine = np.eye(4)
    affine[:3] = np.reshape(values, (3, 4))
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    assume((lengths > 1e-3).all())
    assume(np.linalg.cond(affine[:3, :3] / lengths) < 900)
    cropped = affine.copy()
    cropped[:3, 3] += affine[:3, :3] @ cut
    moved = np.subtract(origin(cropped), origin(affine))
    assert moved == pytest.approx(np.multiply(cut, lengths), rel=1e-6, abs=1e-6)


@given(st.tuples(*[st.floats(-3, 3)] * 3), st.tuples(*[st.floats(0.2, 5)] * 3), st.tuples(*[st.floats(-500, 500)] * 3))
def test_a_rotated_volume_has_the_worlds_distances(angles, steps, offset):
    c, s = np.cos(angles), np.sin(angles)
    turn = np.eye(3)
    for i, (a, b) in enumerate(((0, 1), (0, 2), (1, 2))):
        step = np.eye(3)
        step[[a, b], [a, b]] = c[i]
        step[a, b], step[b, a] = -s[i], s[i]
        turn = turn @ step
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(steps)
    affine[:3, 3] = offset
    assert orientation(affine).spacing == pytest.approx(steps)
    assert np.linalg.norm(origin(affine)) == pytest.approx(np.linalg.norm(offset), abs=1e-6)
    assert origin(affine) == pytest.approx(turn.T @ offset, abs=1e-6)


@pytest.mark.parametrize(
    "affine",
    [
        np.zeros((4, 4)),
        np.diag([2.0, 0, 3, 1]),
        np.full((4, 4), np.nan),
        np.full((4, 4), np.inf),
        np.full((4, 4), 1e300),
        np.full((4, 4), 1.7e308),
        np.full((4, 4), 5e-324),
        np.ones((4, 4)),
        np.eye(1),
        np.zeros((0, 0)),
        np.ones((3, 4)),
        np.eye(7),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [SHAPE, SHAPE[1:], (3, 200, 90), (200, 90)])
def test_no_affine_gives_a_step_of_nothing_or_a_number_that_json_lacks(affine, shape):
    image = only(node("a", shape, affine=affine))
    assert len(image.scale) == len(image.axes) == len(shape)
    assert all(np.isfinite(step) and step > 0 for step in image.scale)
    assert all(np.isfinite(place) for place in image.translation)
    json.dumps(entry_metadata([image]), allow_nan=False)


def test_a_singular_affine_has_steps_of_1():
    assert only(node("a", affine=np.diag([2.0, 0, 3, 1]))).scale == (1.0, 2.0, 1.0, 3.0)
    assert only(node("a", affine=np.zeros((4, 4)))).scale == (1.0, 1.0, 1.0, 1.0)


def test_an_affine_to_lps_is_one_to_ras_before_anything_is_said_of_it():
    image = only(node("a", affine=np.array([[2.0, 0, 0, 7], [0, 2, 0, 8], [0, 0, 2, 9], [0, 0, 0, 1]]), space="LPS"))
    assert image.translation == (0.0, 7.0, 8.0, 9.0)  # the axes run to the left and to posterior


# --- Axes and what is an image ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "axes"),
    [
        (node("a"), "cxyz"),
        (node("a", SHAPE[1:]), "xyz"),
        (node("a", (40, 50)), "yx"),
        (node("a", (3, 40, 50)), "cyx"),
        (node("a", (3, 40, 50), affine=np.eye(3)), "cxy"),
        (node("a", (1, 40, 50), affine=SAGITTAL, spatial_ndim=2), "cyz"),
        (node("a", (40, 50, 60), affine=OBLIQUE[[2, 0, 1, 3]]), "yzx"),
        (node("a", (70, 40, 50, 60), affine=OBLIQUE), "cxyz"),  # points in time are channels to MONAI
        (node("a", dtype=">f4"), "cxyz"),
        (node("a", dtype="|b1"), "cxyz"),
    ],
)
def test_axes_bear_the_names_of_the_worlds_that_they_run_along(part, axes):
    assert only(part).axes == axes


LAST = {"spatial_shape": inline(np.array([40, 50, 60])), "original_channel_dim": -1}


@pytest.mark.parametrize(
    "part",
    [
        node("a", (9000,)),
        node("a", (2, 1, 40, 50, 60)),  # a batch
        node("a", (40, 50, 60, 3), affine=np.eye(4), **LAST),  # channels last: the specification has no such order
        node("a", dtype="<c8"),
        node("a", dtype=">c8"),
        node("a", dtype="<i2", torch_dtype="bfloat16"),
        node("a", dtype="|u1", torch_dtype="float8_e4m3fn"),
        node("a", dtype="<U2"),
        node("a", dtype="<M8[s]"),
        node("a", (0, 40, 50)),
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_what_viewers_could_not_show_is_no_image(part):
    assert found_in(a=part) == {}


def test_arrays_within_the_document_or_stored_in_another_shape_are_no_images():
    assert find_images({"a": node("a")}, {}) == {}
    assert find_images({"a": node("a", dtype="<f16")}, {"a": (*SHAPE, 16)}) == {}
    assert find_images({"affine": inline(np.eye(4))}, {}) == {}


@pytest.mark.parametrize(
    "meta",
    [
        {"space": inline(np.zeros(3))},
        {"spatial_shape": [[1, 2], 3], "original_channel_dim": -1},
        {"spatial_shape": "x", "original_channel_dim": inline(np.zeros(3))},
        {"affine": inline(np.full((4, 4), "abc"))},
        {"affine": inline(np.eye(4, dtype=complex))},
        {"affine": {"$ndarray": {"dtype": "<f8", "shape": [90, 90], "array": "far"}}},
        {"affine": "none"},
        {"affine": {"$unknown": 1}},
    ],
    ids=str,
)
def test_metadata_of_any_kind_do_no_harm(meta):
    part = node("a", affine=np.eye(4))
    part["$metatensor"]["meta"] |= meta
    assert only(part).axes == "cxyz"


def test_the_main_image_comes_first_and_the_others_in_their_order():
    small, flat = node("small", (1, 9, 9, 9)), node("flat", (9, 9))
    found = found_in(mask=node("mask"), small=small, image=node("image"), flat=flat)
    assert list(found) == ["image", "mask", "small", "flat"]


# --- Labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["label", "seg", "aorta_mask", "gt", "Annotation"])
def test_a_label_lies_over_an_image_of_its_extents(name):
    assert found_in(image=node("image"), **{name: node(name)})[name].over_image
    assert found_in(image=node("image"), **{name: node(name, SHAPE[1:])})[name].over_image
    assert found_in(image=node("image", (4, *SHAPE[1:])), **{name: node(name)})[name].over_image


@pytest.mark.parametrize(
    "parts",
    [
        {"label": node("label")},
        {"label": node("label"), "seg": node("seg")},
        {"label": node("label"), "image": node("image", (1, 40, 50, 61))},
        {"label": node("label", (3, *SHAPE[1:])), "image": node("image")},  # one channel for each class
        {"label": node("label"), "image": node("image", dtype="<c8")},
        {"target": node("target"), "image": node("image")},
    ],
)
def test_other_labels_are_images_of_the_entry(parts):
    found = found_in(**parts)
    assert found
    assert not any(image.over_image for image in found.values())


@pytest.mark.parametrize(
    ("values", "dtype", "yes"),
    [
        ([0, 1, 4], "u1", True),
        ([0, -1, 400], "f4", True),
        ([0, 1, 70_000], "i8", True),
        ([0, 1, 2**60], "u8", True),
        ([0, 1, 1], "?", False),
        ([0, 0.5, 1], "f4", False),  # a table: the codes are no values
        ([0, np.nan, 1], "f4", False),
    ],
)
def test_labels_are_stored_as_the_integers_that_they_are(values, dtype, yes):
    image = found_in(image=node("image"), label=node("label"))["label"]
    array = np.resize(np.array(values).astype(dtype), 9000)
    codes, narrowing = narrow(array)
    assert is_label(image, narrowing) is yes
    if yes:
        assert codes.astype(object).tolist() == array.astype(object).tolist()
    plain = found_in(label=node("label"))["label"]
    assert not is_label(plain, narrowing)


# --- Documents --------------------------------------------------------------------------------------------------------


def test_the_documents():
    found = found_in(image=node("image", affine=np.diag([-2.0, 2, 3, 1])), label=node("label", SHAPE[1:]))
    assert entry_metadata([found["image"]]) == {
        "version": "0.5",
        "multiscales": [
            {
                "name": "image",
                "axes": [
                    {"name": "c", "type": "channel"},
                    {"name": "x", "type": "space", "unit": "millimeter"},
                    {"name": "y", "type": "space", "unit": "millimeter"},
                    {"name": "z", "type": "space", "unit": "millimeter"},
                ],
                "datasets": [
                    {
                        "path": "image",
                        "coordinateTransformations": [
                            {"type": "scale", "scale": [1.0, 2.0, 2.0, 3.0]},
                            {"type": "translation", "translation": [0.0, 0.0, 0.0, 0.0]},
                        ],
                    }
                ],
            }
        ],
    }
    groups = label_groups([found["label"]])
    assert list(groups) == ["labels", "labels/label"]
    assert groups["labels"] == {"version": "0.5", "labels": ["label"]}
    assert groups["labels/label"] == {
        "version": "0.5",
        "multiscales": [
            {
                "name": "label",
                "axes": [{"name": name, "type": "space"} for name in "xyz"],
                "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]}],
            }
        ],
        "image-label": {"source": {"image": "../../"}},
    }


def test_nothing_is_said_of_entries_without_images():
    assert entry_metadata([]) is None
    assert label_groups([]) == {}


def test_the_documents_stay_small():
    image = only(node("image", affine=OBLIQUE / 3))
    for ome in (entry_metadata([image]), label_groups([image])["labels/image"]):
        assert len(json.dumps(ome, separators=(",", ":"))) < 600
