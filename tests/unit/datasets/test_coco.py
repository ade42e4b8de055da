"""`CocoDataset` groups the annotations of each image, as pycocotools does."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

import headrace as hr
from headrace.errors import ShardError

RANDOM = np.random.default_rng(0)
PNG = io.BytesIO()
Image.new("RGB", (40, 30)).save(PNG, "PNG")
IMAGES = [{"id": 90 - n, "file_name": f"{n}.png", "height": 30, "width": 40} for n in range(20)]
CATEGORIES = [{"id": number, "name": f"name {number}"} for number in (90, 1, 18)]
ANNOTATIONS = [
    {
        "id": 1000 - n,
        "image_id": int(RANDOM.integers(71, 86)),  # those of 86 to 90 have none
        "category_id": int(RANDOM.choice([1, 18, 90])),
        "bbox": RANDOM.uniform(1, 30, 4).round(2).tolist(),
        "area": 7.5 * n,
        "iscrowd": n % 5 == 0,
        "segmentation": {"counts": "a0", "size": [30, 40]}
        if n % 5 == 0
        else [RANDOM.uniform(0, 9, 6).tolist()],
        **({"keypoints": [n, 2, 1], "num_keypoints": 1} if n % 2 else {}),
    }
    for n in range(100)
]
CONTENT = {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES}


def changed(**fields):
    """The content with another first annotation; None leaves a field out."""
    first = {
        name: value for name, value in {**ANNOTATIONS[0], **fields}.items() if value is not None
    }
    return {**CONTENT, "annotations": [first, *ANNOTATIONS[1:]]}


def test_targets_are_those_of_pycocotools(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    for image in IMAGES:
        (tmp_path / image["file_name"]).write_bytes(PNG.getvalue())
    coco = COCO(tmp_path / "a.json")
    dataset = pickle.loads(
        pickle.dumps(hr.CocoDataset(tmp_path, (tmp_path / "a.json").as_uri()), 5)
    )
    assert dataset.category_ids == tuple(sorted(coco.getCatIds()))
    assert dataset.classes == ("name 1", "name 18", "name 90")
    with hr.DataLoader(
        dataset, batch_size=None, num_workers=1, transform=hr.decode.image()
    ) as loader:
        for (pixels, target), image in zip(loader, IMAGES, strict=True):
            assert target["image_id"] == image["id"]
            assert list(pixels.shape[1:]) == target["size"] == [30, 40]
            wanted = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
            assert target["ids"].tolist() == [each["id"] for each in wanted]
            assert [dataset.category_ids[label] for label in target["labels"]] == [
                each["category_id"] for each in wanted
            ]
            left, top, width, height = np.array([each["bbox"] for each in wanted]).reshape(-1, 4).T
            np.testing.assert_allclose(
                target["boxes"], np.stack([left, top, left + width, top + height], 1), rtol=1e-6
            )
            for name in ("area", "iscrowd"):
                assert target[name].tolist() == [each[name] for each in wanted]
            for name in ("segmentation", "keypoints"):
                assert target[name] == [each.get(name) for each in wanted]
    with pytest.raises(ValueError, match=r"boxes are for an image of \[30, 40\]"):
        hr.decode.image(size=8)(dataset[0])


def test_images_without_annotations_or_boxes():
    target = hr.CocoDataset("s3://bucket", CONTENT).target(0)
    assert (target["boxes"].shape, target["segmentation"]) == ((0, 4), [])
    captions = [{"id": n, "image_id": 90, "caption": f"caption {n}"} for n in range(5)]
    target = hr.CocoDataset("s3://bucket", {"images": IMAGES, "annotations": captions}).target(0)
    assert target.keys() == {"image_id", "size", "ids", "caption"}


@pytest.mark.parametrize(("orientation", "upright"), [(3, False), (6, False), (6, True)])
def test_box_and_pixels_are_both_stored_or_both_upright(tmp_path, orientation, upright):
    picture, exif = Image.new("RGB", (16, 8), "black"), Image.Exif()
    picture.paste("white", (0, 0, 4, 2))
    exif[0x112] = orientation
    picture.save(tmp_path / "0.png", exif=exif)
    width, height, box = (8, 16, [6, 0, 2, 4]) if upright else (16, 8, [0, 0, 4, 2])
    image = {"id": 1, "file_name": "./0.png", "width": width, "height": height}
    content = {
        **CONTENT,
        "images": [image],
        "annotations": [{**ANNOTATIONS[0], "image_id": 1, "bbox": box}],
    }
    pixels, target = hr.decode.image()(hr.CocoDataset(tmp_path, content)[0])
    left, top, right, bottom = target["boxes"][0].int()
    assert pixels[:, top:bottom, left:right].min() == 255
    assert pixels.sum() == 3 * 8 * 255


def test_ids_and_masks_of_other_writers():
    mask = {"size": [30, 40], "counts": b"P2"}
    own = {**ANNOTATIONS[0], "area": None, "bbox": [1, 2, 3, 4]}
    content = {
        **CONTENT,
        "annotations": [{**own, "image_id": n, "id": 1.0, "segmentation": mask} for n in (90, 89)],
    }
    targets = [hr.CocoDataset("s3://bucket", content).target(number) for number in range(2)]
    assert [(each["ids"].tolist(), each["area"].tolist()) for each in targets] == [
        ([1], [12.0])
    ] * 2
    assert targets[0]["segmentation"] == [{"size": [30, 40], "counts": "P2"}]
    content["annotations"][1]["id"] = "a"
    assert hr.CocoDataset("s3://bucket", content).target(1)["ids"] == ["a"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(bbox=[1, 2, 0, 4]), "1 boxes without width or height"),
        (changed(image_id=5), "1 annotations of unknown images"),
        (
            changed(id=ANNOTATIONS[1]["id"], image_id=ANNOTATIONS[1]["image_id"]),
            "1 annotations with the id of an earl",
        ),
        (
            changed(category_id=7),
            r"1 annotations of unknown categories \(first annotations\[0\]: {'id': 1000",
        ),
        *(
            (changed(bbox=box), "1 annotations with a field that is")
            for box in (None, [], [1, 2, 3, 4, 5])
        ),
        (
            {**CONTENT, "annotations": [None, *ANNOTATIONS[1:]]},
            "1 annotations with a field that is",
        ),
        (changed(bbox=[float("nan"), 2, 3, 4]), "1 boxes or areas that are not finite"),
        (
            {**CONTENT, "categories": []},
            "no annotation is right: 100 annotations of unknown categories",
        ),
        ({**CONTENT, "images": [*IMAGES, IMAGES[0]]}, "same id"),
        ({"images": IMAGES}, "'annotations'"),
    ],
)
def test_defects_are_said_in_a_warning_or_an_error(content, said):
    if said.startswith("1 "):
        with pytest.warns(UserWarning, match=said):
            dataset = hr.CocoDataset("s3://bucket", content)
        assert sum(len(dataset.target(index)["ids"]) for index in range(20)) == 99
    else:
        with pytest.raises(ShardError, match=said):
            hr.CocoDataset("s3://bucket", content)
