"""Images with the objects in them, by an annotations file of COCO."""

from __future__ import annotations

import json
import operator
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace._core.shards.discovery import Shards, find_shards
from headrace._core.store.listing import Catalog, StringArray
from headrace._core.store.store import StoreLike, as_store
from headrace._core.streams.blocking import background_loop
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.errors import ShardError

__all__ = ["CocoDataset"]


class CocoDataset(ObjectDataset):
    """The images of an annotations file of COCO (instances, keypoints, captions), each with its annotations.

    A sample is ``ObjectSample(key, data, label)``; its label a dict, for N annotations, which may be none: `image_id`,
    `size` ([height, width], None where unknown) and `ids` (int64 [N]); of those with boxes also `boxes` (float32 [N, 4]
    of left, top, right and bottom in pixels), `labels` (int64 [N], positions in `classes`), `area` (float32 [N]; the
    box's if the file has none) and `iscrowd` (bool [N]); and a list of N for each other field, such as `segmentation`,
    `keypoints` or `caption`, None where it is missing. Batches need a `collate_fn`.

    Annotations of unknown images, with the id of an earlier one, or of a box without width or height are left out, with
    a warning. Parsing takes some six times the file's size in memory. Blocks, as `ObjectDataset`.

    Args:
        store: where the images are; each `file_name` is a key in it.
        annotations: path or URL of the file (read by `store` if it is below its URL), shard of `headrace.hub`, or dict.

    Attributes:
        category_ids: the file's id of each of `classes`, ascending.
        left_out: numbers of annotations, by the reason why they were left out.

    Raises:
        ShardError: the file is not as COCO's.

    Example:
        >>> dog = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 40]}
        >>> content = {"images": [{"id": 7, "file_name": "7.jpg"}], "annotations": [dog]}
        >>> dataset = CocoDataset("s3://bucket/train", content | {"categories": [{"id": 18, "name": "dog"}]})
        >>> dataset.target(0)["boxes"].tolist(), dataset.classes
        ([[10.0, 20.0, 40.0, 60.0]], ('dog',))
    """

    def __init__(self, store: StoreLike, annotations: Shards | Mapping[str, Any]) -> None:
        self._store, name, content = as_store(store), "annotations", annotations
        try:
            if not isinstance(content, Mapping):
                inside = isinstance(content, str) and content.startswith(self._store.url.rstrip("/") + "/")
                (shard,) = find_shards(content, suffixes=(".json",), store=self._store if inside else None)
                name = shard.name
                content = json.loads(bytes(background_loop().run(shard.store.read_all(shard.key))))
            self._hold(self._parse(content), None)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            what = f"no field, or category, {error}" if isinstance(error, KeyError) else str(error)
            raise ShardError(f"not as annotations of COCO: {what}", shard=name) from None
        if said := [f"{count} {why}" for why, count in self.left_out.items()]:
            warnings.warn(f"{name}: {', '.join(said)} are left out", stacklevel=2)

    def _parse(self, content: Any) -> Catalog:
        images, categories = content["images"], sorted(content.get("categories", ()), key=lambda each: each["id"])
        labels = {category["id"]: label for label, category in enumerate(categories)}
        groups: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
        if len(groups) < len(images) or len(labels) < len(categories):
            raise ValueError("several images, or categories, have the same id")
        self._classes, self.category_ids = tuple(each["name"] for each in categories), tuple(labels)
        self.left_out, ids = Counter[str](), set[int]()
        for each in content["annotations"]:
            box = each.get("bbox", (0, 0, 1, 1))
            if each["id"] in ids:
                self.left_out["annotations with the id of an earlier one"] += 1
            elif each["image_id"] not in groups:
                self.left_out["annotations of unknown images"] += 1
            elif not (box[2] > 0 and box[3] > 0):
                self.left_out["boxes without width or height"] += 1
            else:
                ids.add(operator.index(each["id"]))
                groups[each["image_id"]].append(each)
        if not images:
            raise ValueError("it has no images")
        self._ends = np.cumsum([0, *(len(groups[image["id"]]) for image in images)])
        marks = [each for image in images for each in groups[image["id"]]]
        names, known = {name for each in marks for name in each}, {"id", "image_id"}
        self._columns: dict[str, Any] = {"ids": np.array([each["id"] for each in marks], np.int64)}
        if not marks or "bbox" in names:
            known |= {"bbox", "category_id", "area", "iscrowd"}
            corners = np.array([each["bbox"] for each in marks], np.float64).reshape(len(marks), 4)
            areas = [each.get("area", each["bbox"][2] * each["bbox"][3]) for each in marks]
            corners[:, 2:] += corners[:, :2]
            if not np.isfinite(corners).all():
                raise ValueError("a box is not finite")
            self._columns["boxes"] = corners.astype(np.float32)
            self._columns["labels"] = np.array([labels[each["category_id"]] for each in marks], np.int64)
            self._columns["area"] = np.array(areas, np.float32)
            self._columns["iscrowd"] = np.array([each.get("iscrowd", 0) for each in marks], np.bool_)
        others, texts = sorted(names - known), []
        for image in images:
            text = {name: [each.get(name) for each in groups[image["id"]]] for name in others}
            text["size"] = [image.get("height"), image.get("width")]
            texts.append(json.dumps(text | {"image_id": image["id"]}))
        self._fields = StringArray(texts)
        return Catalog(StringArray(image["file_name"] for image in images))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the categories, in the order of their ids."""
        return self._classes

    def target(self, index: int) -> dict[str, Any]:
        """The label of the sample at `index`, without reading its image."""
        index = range(len(self))[index]
        target: dict[str, Any] = json.loads(self._fields[index])
        for name, column in self._columns.items():
            target[name] = torch.from_numpy(column[self._ends[index] : self._ends[index + 1]].copy())
        return target

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """The sample at `index`, of the bytes of its image."""
        return ObjectSample(self._keys[index], data, self.target(index))
