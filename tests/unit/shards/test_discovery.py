"""Shard names: braces as in Bash, globs that know directories."""

import contextlib
import os
import re
import subprocess
from glob import glob

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import LinesDataset, ParquetDataset, Store, StoreError
from headrace._shards.discovery import expand_braces, glob_expression
from headrace.errors import EmptyListingError, ObjectNotFoundError
from object_server import ObjectServer
from tests.servers import store_of
from tests.unit.shards.resuming import in_folder
from tests.unit.shards.tars import parquet


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{0008..0011}.tar", ["0008.tar", "0009.tar", "0010.tar", "0011.tar"]),
        ("{a,b,{1..2}{x,y}}", ["a", "b", "1x", "1y", "2x", "2y"]),
        ("a{b", ["a{b"]),
        (
            "{a}{,-b}{9..11}{2..1}",
            [f"{{a}}{b}{c}{d}" for b in ("", "-b") for c in (9, 10, 11) for d in (2, 1)],
        ),
    ],
)
def test_braces_expand_as_in_bash(pattern, names):
    assert expand_braces(pattern) == names
    bash = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {pattern}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert bash.stdout.splitlines() == names


HIDDEN = [
    "a.txt",
    "d/a.txt",
    ".a.txt",
    ".d/a.txt",
    "d/.a.txt",
    "d/.e/a.txt",
    "d/e/a.txt",
    "x.a.txt",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.txt",
        "*/*.txt",
        "**/*.txt",
        "**",
        "?*.txt",
        "[.xa]*.txt",
        "d/**",
        ".*",
        ".d/*",
        "**/.*",
        "*a*.*t*",
        "**/*.*.txt",
    ],
)
def test_globs_match_hidden_names_as_pythons_glob(pattern, tmp_path):
    in_folder(tmp_path, dict.fromkeys(HIDDEN, b""))
    found = {
        key
        for key in glob(pattern, root_dir=tmp_path, recursive=True)
        if (tmp_path / key).is_file()
    }
    assert {key for key in HIDDEN if glob_expression(pattern).fullmatch(key)} == found
    everything = {
        key for key in HIDDEN if glob_expression(pattern, hidden=True).fullmatch(key)
    }
    if not pattern.endswith("**"):  # of pathlib's: directories only
        assert everything == {
            path.relative_to(tmp_path).as_posix()
            for path in tmp_path.glob(pattern)
            if path.is_file()
        }


def test_directory_of_shards_has_no_hidden_or_temporary_ones(tmp_path):
    shown, hidden = (
        ("a.txt", "_b.txt", "part=1/c.txt"),
        (".d.txt", ".ipynb_checkpoints/e.txt"),
    )
    for key in (*shown, *hidden, "_temporary/0/f.txt"):
        in_folder(tmp_path, {key: f"{key}\n".encode()})
    assert list(LinesDataset(tmp_path)) == ["_b.txt", "a.txt", "part=1/c.txt"]
    assert list(LinesDataset(tmp_path / "_temporary" / "0")) == ["_temporary/0/f.txt"]


def test_glob_is_not_ended_by_what_it_does_not_match(tmp_path):
    in_folder(tmp_path, {"a/0.jsonl": b"0\n", "1.jsonl": b"1\n"})
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.jsonl").symlink_to("nothing")
    (tmp_path / "a\tb\n").mkdir()
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"")
    assert (
        list(LinesDataset(f"{tmp_path}/*.jsonl"))
        == list(LinesDataset(f"{tmp_path}/l*/*.jsonl"))
        == [1]
    )
    assert list(LinesDataset("[a]/?.jsonl", store=tmp_path.as_uri())) == [0]
    (tmp_path / "a\tb\n" / "2.jsonl").write_text("2\n")
    with pytest.raises(
        StoreError, match=r"'a\\tb\\n/2.jsonl': this cannot be the key of an object"
    ):
        LinesDataset(f"{tmp_path}/*/*.jsonl")


KEYS = {
    **{f"train-{i}.txt": b"" for i in range(3)},
    **{f"train-images/{i:05}.txt": b"" for i in range(3000)},
    **{
        f"{year}/{month}/{i:03}.txt": b""
        for year in "ab"
        for month in "xy"
        for i in range(400)
    },
    **{f"z{i:05}": b"" for i in range(3000)},
}


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("train-?.txt", 4),
        ("tr*/*1.txt", 8),
        ("*/x/00?.txt", 8),
        ("a/*/39[!0-8].txt", 3),
        ("y*", 4),
    ],
)
def test_glob_lists_only_directories_whose_paths_match(pattern, most):
    with ObjectServer(KEYS) as server:
        store = store_of(server)
        wanted = sorted(key for key in KEYS if glob_expression(pattern).fullmatch(key))
        with contextlib.nullcontext() if wanted else pytest.raises(EmptyListingError):
            assert LinesDataset(pattern, store=store).shards == tuple(
                f"{server.url}/{key}" for key in wanted
            )
        assert server.requests()["LIST"] <= most


def test_directory_that_is_named_as_a_shard_is_read_as_a_directory(tmp_path):
    part = parquet(pyarrow.table({"n": [7]}))
    files = {"t.parquet/_SUCCESS": b"", "t.parquet/x=1/part-0.parquet": part}
    in_folder(tmp_path, files)
    with ObjectServer({"t.parquet/": b"", "t.parquet/x=1/": b"", **files}) as server:
        for store in (Store(tmp_path), store_of(server)):
            for name in (
                "t.parquet",
                "t.parquet/",
                "*.parquet",
                "t*.parquet",
                "**/*.parquet",
                "t.parquet/*/*",
            ):
                assert list(ParquetDataset(name, store=store)) == [{"n": 7, "x": 1}], name
            with pytest.raises(ObjectNotFoundError, match=r"'u\.parquet': not found"):
                ParquetDataset("u.parquet", store=store)


@pytest.mark.parametrize(
    "pattern", ["{a,b}" * 30, "{0..999999999}", "{a,{0..1999999}}.tar"]
)
def test_braces_that_stand_for_too_many_names_are_an_error_that_says_how_many(pattern):
    with pytest.raises(
        ValueError, match=r"stand for [\d,]+ names, and 1,000,000 are the most"
    ):
        expand_braces(pattern)


@pytest.mark.parametrize(
    "pattern", ["train-*-*-*-*-*.tar", "*a" * 30, "**/*-*-*-*.tar", "**/a/" * 9 + "b"]
)
def test_globs_with_many_stars_end(pattern):
    for key in ("train-" + "-" * 3000, "a" * 3000 + "b", "a/" * 400 + "c"):
        assert not glob_expression(pattern).fullmatch(key)


@given(
    st.lists(st.sampled_from(["a", "b", "*", "?", "**", "/", "."]), max_size=7),
    st.text("ab/.", max_size=9),
)
def test_globs_match_as_their_expressions_with_backtracking(parts, key):
    pattern = "".join(parts)
    found = glob_expression(pattern, hidden=True)
    tried = re.compile(found.pattern.replace("(?>", "(?:"))
    assert bool(found.fullmatch(key)) == bool(tried.fullmatch(key))
