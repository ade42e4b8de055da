"""`FileDataset` gives each file under a directory as a sample."""

import os
import pickle

import pytest

from headrace.datasets import files
from headrace.datasets.files import FileDataset
from headrace.errors import EmptyListingError
from tests.unit.shards.resuming import in_folder


@pytest.fixture
def root(tmp_path):
    names = ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.jpg")
    return in_folder(tmp_path, {name: name.encode() for name in names})


def test_pattern_and_suffix_choose(root):
    assert FileDataset(root, "*").keys == ("a.txt", "b.txt")
    assert FileDataset(root, "deep/**/*").keys == ("deep/d.jpg", "deep/er/c.txt")
    assert FileDataset(root, suffix=".jpg").keys == ("deep/d.jpg",)
    assert len(FileDataset(root, suffix=(".jpg", ".txt"))) == 4


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_error_of_a_function_of_labels_is_raised(root, error):
    def label(key):
        if key == "b.txt":
            raise error("no label")

    with pytest.raises((error, RuntimeError)):
        FileDataset(root, labels=label)


def test_a_relative_root_stays_the_same_place(root, monkeypatch):
    monkeypatch.chdir(root)
    dataset = pickle.loads(pickle.dumps(FileDataset("deep")))
    monkeypatch.chdir("/")
    assert dataset[0].data == b"deep/d.jpg"


def test_errors_name_what_was_looked_for(root):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        FileDataset(root / "nowhere")
    with pytest.raises(EmptyListingError, match=r"'\*\.png'.*file://"):
        FileDataset(root, "*.png")
    with pytest.raises(EmptyListingError, match=r"suffix='\.png'"):
        FileDataset(root, suffix=".png")
    dataset = FileDataset(root)
    (root / "b.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.txt"):
        dataset[1]
    with pytest.raises(IndexError, match="out of range"):
        dataset[4]


@pytest.mark.parametrize("more", [0, 1, files.PIECE + 1])
async def test_large_file_is_read_in_pieces_and_comes_whole(tmp_path, more):
    content = b"0123456789abcdef" * (files.LARGE // 16) + b"x" * more
    (tmp_path / "large").write_bytes(content)
    sample = await FileDataset(tmp_path).aget(0)
    assert sample.data == content


@pytest.mark.skipif(
    not os.path.exists("/proc/sys/kernel/ostype"), reason="there is no /proc"
)
def test_a_file_whose_size_is_not_told_comes_whole():
    assert FileDataset("/proc/sys/kernel", "ostype")[0].data == b"Linux\n"


def test_links_are_followed_but_not_in_circles(tmp_path):
    in_folder(tmp_path, {"elsewhere/deep/1.jpg": b"dog", "root/cat/1.jpg": b"cat"})
    root = tmp_path / "root"
    (root / "cat" / "2.jpg").symlink_to(root / "cat" / "1.jpg")
    (root / "dog").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "up").symlink_to(root)
    (root / "gone").symlink_to(tmp_path / "nothing")
    assert FileDataset(root).keys == ("cat/1.jpg", "cat/2.jpg", "dog/deep/1.jpg")
    assert FileDataset(root, "dog/**/*.jpg").keys == ("dog/deep/1.jpg",)
