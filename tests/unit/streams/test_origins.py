"""Errors of functions name the file and the line, or the row, of the sample that they were given."""

import json

import pytest

import headrace as hr

READ = {
    "whole": lambda stream: stream,
    "shuffled": lambda stream: stream.shuffle(9),
    "filtered and shuffled": lambda stream: stream.filter(is_kept).shuffle(9).take(40),
}


def is_kept(row):
    return row["row"] % 3 > 0


def fail_at_some(row):
    if row["row"] % 4 == 2:
        raise ValueError(f"{row['file']}, {row['row']}")
    return row


def lines(folder, **options):
    for file in range(3):
        rows = ({"file": f"{file}.jsonl", "row": row} for row in range(1, 10 + 20 * file))
        (folder / f"{file}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return hr.LinesDataset(folder, **options)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: lines(folder, shuffle=True, buffer_size=5),
        lambda folder: lines(folder).split(rank=1, world_size=2),
    ],
    ids=["shuffled", "split"],
)
def test_failure_has_the_place_of_its_sample(tmp_path, make, num_workers, read):
    found = []
    stream = make(tmp_path)
    arguments = {
        "transform": fail_at_some,
        "num_workers": num_workers,
        "collate_fn": list,
    }
    skip = lambda failure: found.append((failure.message, failure.key)) or "skip"  # noqa: E731
    with hr.DataLoader(READ[read](stream), 5, on_error=skip, **arguments) as loader:
        iterator = iter(loader)
        given, state = [next(iterator), next(iterator)], loader.state_dict()
    with hr.DataLoader(READ[read](stream), 5, on_error=skip, **arguments) as loader:
        loader.load_state_dict(state)
        given += list(loader)
    assert len(found) >= 4
    for message, key in found:
        file, row = message.split(", ")
        assert key.endswith(f"/{file}, non-empty line {row}")


@pytest.mark.parametrize("where", ["transform", "collate_fn", "filter"])
def test_error_and_warning_name_file_and_line(tmp_path, where):
    stream, arguments = lines(tmp_path, shards_in_parallel=1), {"collate_fn": list}
    if where == "filter":
        stream = stream.filter(fail_at_some)
    elif where == "transform":
        arguments["transform"] = fail_at_some
    else:
        arguments["collate_fn"] = lambda rows: [fail_at_some(row) for row in rows]
    loader = hr.DataLoader(stream, 3, **arguments)
    with pytest.raises(ValueError, match=r"0\.jsonl, 2") as caught:
        next(iter(loader))
    assert "0.jsonl, non-empty line 2'" in "".join(caught.value.__notes__)
    loader = hr.DataLoader(stream, 3, on_error="skip", **arguments)
    with loader, pytest.warns(RuntimeWarning, match=r"0\.jsonl, non-empty line 2'"):
        next(iter(loader))
