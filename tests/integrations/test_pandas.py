"""Columns of a pandas table as labels."""

import pytest

import headrace as hr

pandas = pytest.importorskip("pandas")


@pytest.mark.parametrize("kind", [hr.FileDataset, hr.ObjectDataset])
def test_labels_of_a_series_are_matched_by_position(kind, tmp_path):
    for key in ("a.jpg", "b.jpg", "c.jpg"):
        (tmp_path / key).write_bytes(b"")
    table = pandas.DataFrame({"key": ["c.jpg", "a.jpg", "x.jpg", "b.jpg"], "label": ["C", "A", "X", "B"]})
    sorted_by_key = table[table["key"] != "x.jpg"].sort_values("key")
    dataset = kind(tmp_path, labels=sorted_by_key["label"])
    assert [(dataset[i].key, dataset[i].label) for i in range(3)] == [("a.jpg", "A"), ("b.jpg", "B"), ("c.jpg", "C")]
    with pytest.raises(TypeError, match="labels= must be"):
        kind(tmp_path, labels=sorted_by_key)
