"""Images and annotations of COCO."""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace._core.shards.discovery import Shards, find_shards, shard_errors
from headrace._core.store.listing import Catalog, StringArray
from headrace._core.store.store import StoreLike, as_store
from headrace._core.streams.blocking import background_loop
from headrace._core.text import short_repr, warn_user
from headrace.datasets.objects import ObjectDataset, ObjectSample

__all__ = ["CocoDataset"]

_BOX_FIELDS = ("bbox", "category_id", "area", "iscrowd")


class CocoDataset(ObjectDataset):
    """Images of a COCO annotations file, each with its annotations.

    The file has instances, keypoints or captions. A sample is ``ObjectSample(key, data, label)``.
    The label is a dict for the N annotations of the image. N may be 0. The dict has the keys:

    - `image_id`: id of the image.
    - `size`: [height, width] in pixels, each None where unknown.
    - `ids`: int64 [N], or a list of text.
    - `boxes`, if the file has boxes: float32 [N, 4], the left, top, right and bottom in pixels.
    - `labels`, if the file has boxes: int64 [N], positions in `classes`.
    - `area`, if the file has boxes: float32 [N]. The area of the box where the file has no area.
    - `iscrowd`, if the file has boxes: bool [N].
    - each other field, such as `segmentation`, `keypoints` or `caption`: a list of N values, with
      None where the field is missing.

    Batches need a `collate_fn`.

    Positions refer to the stored pixels: `headrace.decode.image` ignores the orientation of EXIF,
    unless `size` fits the upright image alone.

    Some annotations are left out: of unknown images or categories, without a valid box, or with the
    id of an earlier annotation of the same image. A warning counts the left-out annotations and
    shows the first of each kind.

    Parsing takes some six times the file's size in memory. The constructor blocks, as
    `ObjectDataset` does.

    Args:
        store: store of the images. Each `file_name` is a key in the store.
        annotations: path or URL of the file, shard of `headrace.hub`, or dict. If the
            file is below the URL of `store`, `store` reads the file.

    Attributes:
        classes: names of the categories, in the order of the category ids.
        category_ids: ids of the categories in the file, ascending, one for each of `classes`.
        left_out: numbers of left-out annotations, by reason.

    Raises:
        ShardError: the file is not in COCO's format, or all annotations would be left out.

    Example:
        >>> dog = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 40]}
        >>> content = {"images": [{"id": 7, "file_name": "7.jpg"}], "annotations": [dog]}
        >>> content["categories"] = [{"id": 18, "name": "dog"}]
        >>> dataset = CocoDataset("s3://bucket/train", content)
        >>> dataset.target(0)["boxes"].tolist(), dataset.classes
        ([[10.0, 20.0, 40.0, 60.0]], ('dog',))
    """

    def __init__(self, store: StoreLike, annotations: Shards | Mapping[str, Any]) -> None:
        self._store, name = as_store(store), "annotations"
        content: Any = annotations
        if not isinstance(annotations, Mapping):
            inside = isinstance(annotations, str) and annotations.startswith(
                f"{self._store.url.rstrip('/')}/"
            )
            (shard,) = find_shards(
                annotations, suffixes=(".json",), store=self._store if inside else None
            )
            name, content = shard.name, background_loop().run(shard.store.read_all(shard.key))
        with shard_errors("not as annotations of COCO", name):
            content = content if isinstance(content, Mapping) else json.loads(bytes(content))
            self._hold(self._parse(content, name), None, None)

    def _parse(self, content: Any, name: str) -> Catalog:
        images = content["images"]
        categories = sorted(content.get("categories") or (), key=lambda each: each["id"])
        labels = {category["id"]: label for label, category in enumerate(categories)}
        groups: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
        if len(groups) < len(images) or len(labels) < len(categories):
            raise ValueError("several images, or categories, have the same id")
        self._classes, self.category_ids = tuple(each["name"] for each in categories), tuple(labels)
        annotations, self.left_out = content["annotations"], Counter[str]()
        has_boxes = not annotations or any("bbox" in each for each in annotations if each)
        seen, shown = set[Any](), dict[str, str]()
        for number, each in enumerate(annotations):
            if defect := _defect(each, seen, groups, labels if has_boxes else None):
                self.left_out[defect] += 1
                shown.setdefault(defect, f"(first annotations[{number}]: {short_repr(each, 120)})")
            else:
                seen.add((each["image_id"], each["id"]))
                groups[each["image_id"]].append(each)
        if not images:
            raise ValueError("it has no images")
        if shown:
            said = ", ".join(f"{self.left_out[why]} {why} {first}" for why, first in shown.items())
            if not seen:
                raise ValueError(f"no annotation is right: {said}")
            warn_user(f"{name}: {said} are left out")
        names = {name for marks in groups.values() for each in marks for name in each}
        self._others = sorted(names - {"id", "image_id", *(_BOX_FIELDS if has_boxes else ())})
        self._label_of = labels if has_boxes else None  # by the id of a category
        self._fields = StringArray(
            json.dumps(
                {
                    "image_id": image["id"],
                    "size": [image.get("height"), image.get("width")],
                    "marks": groups[image["id"]],
                },
                default=bytes.decode,  # masks of pycocotools are bytes
            )
            for image in images
        )
        return Catalog(StringArray(posixpath.normpath(image["file_name"]) for image in images))

    def target(self, index: int) -> dict[str, Any]:
        """Return the label at `index`, without reading the image."""
        index = range(len(self))[index]
        target: dict[str, Any] = json.loads(self._fields[index])
        marks = target.pop("marks")
        target |= {name: [each.get(name) for each in marks] for name in self._others}
        target["ids"] = [each["id"] for each in marks]
        with contextlib.suppress(TypeError, ValueError):  # ids that are text
            target["ids"] = torch.tensor(target["ids"], dtype=torch.int64)
        if self._label_of is not None:
            boxes = np.array([each["bbox"] for each in marks], np.float64).reshape(-1, 4)
            # A missing area is NaN here.
            areas = np.array([each.get("area") for each in marks], np.float64)
            areas = np.where(np.isnan(areas), boxes[:, 2] * boxes[:, 3], areas)
            boxes[:, 2:] += boxes[:, :2]
            labels = [self._label_of[each["category_id"]] for each in marks]
            crowds = [bool(each.get("iscrowd")) for each in marks]
            target["area"] = torch.tensor(areas, dtype=torch.float32)
            target["boxes"] = torch.tensor(boxes, dtype=torch.float32)
            target["labels"] = torch.tensor(labels, dtype=torch.int64)
            target["iscrowd"] = torch.tensor(crowds, dtype=torch.bool)
        return target

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """Make the sample at `index` from the bytes of the image."""
        return ObjectSample(self._keys[index], data, self.target(index))


def _defect(each: Any, seen: set[Any], images: Any, labels: Mapping[Any, int] | None) -> str:
    """Return the reason to leave out an annotation, or "".

    `labels` is None if the file has no boxes.
    """
    try:
        if (each["image_id"], each["id"]) in seen:
            return "annotations with the id of an earlier one"
        if each["image_id"] not in images:
            return "annotations of unknown images"
        if labels is None:
            return ""
        if each["category_id"] not in labels:
            return "annotations of unknown categories"
        left, top, width, height = map(float, each["bbox"])
        if not math.isfinite(left + top + width + height + float(each.get("area") or 0)):
            return "boxes or areas that are not finite"
        return "" if width > 0 and height > 0 else "boxes without width or height"
    except (LookupError, TypeError, ValueError, AttributeError):
        return "annotations with a field that is missing or of another form"
