"""`CocoDataset` groups the annotations of each image, as pycocotools does."""

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

import headrace as hr
from headrace.datasets.objects import ObjectSample
from headrace.errors import ShardError

RANDOM = np.random.default_rng(0)
IMAGES = [{"id": 90 - n, "file_name": f"{n}.jpg", "height": 30 + n, "width": 40} for n in range(20)]
CATEGORIES = [{"id": number, "name": f"name {number}"} for number in (90, 1, 18)]
ANNOTATIONS = [
    {
        "id": 1000 - n,
        "image_id": int(RANDOM.integers(71, 86)),  # some images have none
        "category_id": int(RANDOM.choice([1, 18, 90])),
        "bbox": RANDOM.uniform(1, 30, 4).round(2).tolist(),
        "area": 7.5 * n,
        "iscrowd": n % 5 == 0,
        "segmentation": {"counts": "a0", "size": [30, 40]} if n % 5 == 0 else [RANDOM.uniform(0, 9, 6).tolist()],
        **({"keypoints": [n, 2, 1], "num_keypoints": 1} if n % 2 else {}),
    }
    for n in range(100)
]
CONTENT = {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES}


def changed(number=0, **fields):
    """The content with another annotation at `number`; None leaves a field out."""
    mark = {name: value for name, value in {**ANNOTATIONS[number], **fields}.items() if value is not None}
    return {**CONTENT, "annotations": [*ANNOTATIONS[:number], mark, *ANNOTATIONS[number + 1 :]]}


@pytest.mark.parametrize("boxes", ["xyxy", "xywh"])
def test_targets_are_those_of_pycocotools(tmp_path, boxes):
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    for image in IMAGES:
        (tmp_path / image["file_name"]).write_bytes(b"image %d" % image["id"])
    coco = COCO(tmp_path / "a.json")
    dataset = pickle.loads(pickle.dumps(hr.CocoDataset(tmp_path, str(tmp_path / "a.json"), boxes=boxes), 5))
    assert dataset.category_ids == tuple(sorted(coco.getCatIds()))
    assert [dataset.classes[label] for label in range(3)] == ["name 1", "name 18", "name 90"]
    with hr.DataLoader(dataset, batch_size=None, num_workers=1) as loader:
        samples = list(loader)
    for sample, image in zip(samples, IMAGES, strict=True):
        target = sample.label
        assert (bytes(sample.data), target["image_id"]) == (b"image %d" % image["id"], image["id"])
        assert target["size"] == [image["height"], image["width"]]
        wanted = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        assert target["ids"].tolist() == [each["id"] for each in wanted]
        assert [dataset.category_ids[label] for label in target["labels"]] == [each["category_id"] for each in wanted]
        left, top, width, height = np.array([each["bbox"] for each in wanted]).reshape(-1, 4).T
        ends = (left + width, top + height) if boxes == "xyxy" else (width, height)
        np.testing.assert_allclose(target["boxes"], np.stack([left, top, *ends], axis=1), rtol=1e-6)
        for name in ("area", "iscrowd"):
            assert target[name].tolist() == [each[name] for each in wanted]
        for name in ("segmentation", "keypoints"):
            assert target[name] == [each.get(name) for each in wanted]


def test_images_without_annotations_are_kept_or_dropped_and_counted():
    bare = {image["id"] for image in IMAGES} - {each["image_id"] for each in ANNOTATIONS}
    dataset = hr.CocoDataset("s3://bucket", CONTENT)
    empty = [dataset.target(n) for n in range(20) if dataset.target(n)["image_id"] in bare]
    assert len(empty) == len(bare) >= 5
    assert all(target["boxes"].shape == (0, 4) and target["segmentation"] == [] for target in empty)
    dataset = hr.CocoDataset("s3://bucket", CONTENT, keep_empty=False, fields=())
    assert (len(dataset), dataset.left_out["images without annotations"]) == (20 - len(bare), len(bare))
    assert "segmentation" not in dataset.target(-1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(bbox=[1, 2, 0, 4]), "1 boxes without width or height"),
        (changed(image_id=5), "1 annotations of unknown images"),
        (changed(id=ANNOTATIONS[1]["id"]), "1 annotations with the id of an earlier one"),
    ],
)
def test_annotations_that_are_left_out_are_said(content, said):
    with pytest.warns(UserWarning, match=said):
        dataset = hr.CocoDataset("s3://bucket", content)
    assert sum(len(dataset.target(index)["ids"]) for index in range(20)) == 99


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(category_id=7), "category, 7"),
        (changed(50, bbox=None), "'bbox'"),
        (changed(bbox=[1, 2, 3, 4, 5]), "inhomogeneous"),
        (changed(bbox=[float("nan"), 2, 3, 4]), "not finite"),
        (changed(id=1.5), "float.*integer"),
        ({**CONTENT, "images": [*IMAGES, IMAGES[0]]}, "same id"),
        ({**CONTENT, "images": []}, "no images"),
        ({"images": IMAGES}, "'annotations'"),
        ([], "list indices"),
    ],
)
def test_other_defects_are_errors_with_the_name_of_the_file(tmp_path, content, said):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ShardError, match=rf"{said}.*a\.json"):
        hr.CocoDataset(tmp_path, tmp_path / "a.json")


def test_image_of_another_size_than_its_boxes_are_for_is_not_decoded():
    png = io.BytesIO()
    Image.new("RGB", (40, 30)).save(png, "PNG")
    label = hr.CocoDataset("s3://bucket", CONTENT).target(0)
    assert hr.decode.image()(ObjectSample("0.png", png.getbuffer(), label))[0].shape == (3, 30, 40)
    with pytest.raises(ValueError, match=r"boxes are for an image of \[30, 40\]"):
        hr.decode.image(size=8)(ObjectSample("0.png", png.getbuffer(), label))


def test_captions_have_no_boxes():
    marks = [{"id": n, "image_id": 90, "caption": f"caption {n}"} for n in range(5)]
    target = hr.CocoDataset("s3://bucket", {"images": IMAGES, "annotations": marks}).target(0)
    assert target.keys() == {"image_id", "size", "ids", "caption"}
    assert target["caption"] == [each["caption"] for each in marks]
