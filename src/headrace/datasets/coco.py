"""Images with the objects in them, by an annotations file of COCO."""

from __future__ import annotations

import json
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
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

    A sample is ``ObjectSample(key, data, label)``; its label a dict of `image_id`, `size` ([height, width], or None),
    `ids` (int64 [N], of the annotations), if they have boxes also `boxes` (float32 [N, 4]: left, top, right, bottom in
    pixels; in the file they have width and height), `labels` (int64 [N], positions in `classes`, from 0), `area`
    (float32 [N]; the box's if the file has none) and `iscrowd` (bool [N]), and for each other field, such as
    `segmentation`, `keypoints` or `caption`, a list of N as in the file, None where it is missing. N differs, and may
    be 0: batches need a `collate_fn`.

    Left out with a warning: annotations of unknown images, or with the id of an earlier one, and boxes without width or
    height. Parsing takes about six times the file's size in memory. Blocks, as `ObjectDataset`.

    Args:
        store: where the images are; each `file_name` is a key in it.
        annotations: path or URL of the file (read by `store` if it is below its URL), shard of `headrace.hub`, or dict.
        keep_empty: whether to keep images without annotations.
        fields: other fields to keep; None for all. They are kept as JSON, the rest as arrays.

    Attributes:
        category_ids: the file's id of each of `classes`, ascending.
        left_out: numbers of annotations, and of images, by the reason why they were left out.

    Raises:
        ShardError: the file is not as COCO's.

    Example:
        >>> dog = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 20, 30, 40]}
        >>> content = {"images": [{"id": 7, "file_name": "7.jpg"}], "annotations": [dog]}
        >>> dataset = CocoDataset("s3://bucket/train", content | {"categories": [{"id": 18, "name": "dog"}]})
        >>> dataset.target(0)["boxes"].tolist(), dataset.classes
        ([[10.0, 20.0, 40.0, 60.0]], ('dog',))
    """

    def __init__(
        self,
        store: StoreLike,
        annotations: Shards | Mapping[str, Any],
        *,
        keep_empty: bool = True,
        fields: Sequence[str] | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise TypeError("fields= must be several names, not one str")
        self._store, name, content = as_store(store), "annotations", annotations
        try:
            if not isinstance(content, Mapping):
                inside = isinstance(content, str) and content.startswith(self._store.url.rstrip("/") + "/")
                (shard,) = find_shards(content, suffixes=(".json",), store=self._store if inside else None)
                name = shard.name
                content = json.loads(bytes(background_loop().run(shard.store.read_all(shard.key))))
            self._hold(self._parse(content, keep_empty, fields), None, None)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            what = f"no field, or category, {error}" if isinstance(error, KeyError) else str(error)
            raise ShardError(f"not as annotations of COCO: {what}", shard=name) from None
        if said := [f"{count} {why}" for why, count in self.left_out.items() if not why.startswith("images")]:
            warnings.warn(f"{name}: {', '.join(said)} are left out", stacklevel=2)

    def _parse(self, content: Any, keep_empty: bool, fields: Sequence[str] | None) -> Catalog:
        images, categories = content["images"], sorted(content.get("categories", ()), key=lambda each: each["id"])
        rows = {image["id"]: row for row, image in enumerate(images)}
        labels = {category["id"]: label for label, category in enumerate(categories)}
        if len(rows) < len(images) or len(labels) < len(categories):
            raise ValueError("several images, or categories, have the same id")
        self._classes, self.category_ids = tuple(each["name"] for each in categories), tuple(labels)
        self.left_out, kept = Counter[str](), dict[int, tuple[int, dict[str, Any]]]()
        for each in content["annotations"]:
            row, box = rows.get(each["image_id"]), each.get("bbox", (0, 0, 1, 1))
            if each["id"] in kept:
                self.left_out["annotations with the id of an earlier one"] += 1
            elif row is None:
                self.left_out["annotations of unknown images"] += 1
            elif not (box[2] > 0 and box[3] > 0):
                self.left_out["boxes without width or height"] += 1
            else:
                kept[operator.index(each["id"])] = row, each
        pairs = sorted(kept.values(), key=lambda pair: pair[0])
        of, marks = np.array([row for row, _ in pairs], np.int64), [each for _, each in pairs]
        known = {"id", "image_id"}
        self._columns: dict[str, Any] = {"ids": np.array([each["id"] for each in marks], np.int64)}
        if not marks or any("bbox" in each for each in marks):
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
        used = np.arange(len(images)) if keep_empty else np.unique(of)
        if not len(used):
            raise ValueError("it has no images")
        self.left_out["images without annotations"] = len(images) - len(used)
        self._bounds = np.stack([np.searchsorted(of, used, side) for side in ("left", "right")])
        names = [*dict.fromkeys(n for each in marks for n in each if n not in known)] if fields is None else fields
        texts = []
        for row, begin, end in zip(used.tolist(), *self._bounds.tolist(), strict=True):
            image = {"image_id": images[row]["id"], "size": [images[row].get("height"), images[row].get("width")]}
            texts.append(json.dumps({name: [each.get(name) for each in marks[begin:end]] for name in names} | image))
        self._fields = StringArray(texts)
        return Catalog(StringArray(images[row]["file_name"] for row in used.tolist()))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the categories, in the order of their ids."""
        return self._classes

    def target(self, index: int) -> dict[str, Any]:
        """The label of the sample at `index`, without reading its image."""
        index = range(len(self))[index]
        columns = {name: column[slice(*self._bounds[:, index])] for name, column in self._columns.items()}
        fields: dict[str, Any] = json.loads(self._fields[index])
        return fields | {name: torch.from_numpy(column.copy()) for name, column in columns.items()}

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """The sample at `index`, of the bytes of its image."""
        return ObjectSample(self._keys[index], data, self.target(index))
