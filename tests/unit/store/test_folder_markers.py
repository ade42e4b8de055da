"""Empty objects that stand for folders are no samples."""

from headrace import ObjectDataset, Store
from object_server import ObjectServer

KEYS = (
    "train/",
    "train/a",
    "train/cats/",
    "train/cats/1.jpg",
    "train/cats/empty",
    "train/cats-2",
    "train/dogs/deep/2.jpg",
)


def test_markers_of_folders_are_left_out_and_empty_objects_are_not():
    with ObjectServer() as server:
        for key in KEYS:
            server.put(key, b"jpeg" if key.endswith(".jpg") else b"")
        dataset = ObjectDataset(Store(f"{server.url}/train", options=server.store_options))
        assert list(dataset.keys) == ["a", "cats-2", "cats/1.jpg", "cats/empty", "dogs/deep/2.jpg"]
        assert [bytes(dataset[index].data) for index in range(5)] == [b"", b"", b"jpeg", b"", b"jpeg"]
