"""Shard names: braces as in Bash, globs that know directories."""

import subprocess
import sys
from glob import glob

import pytest

from headrace import LinesDataset
from headrace._core.shards.discovery import expand_braces, glob_expression

KEYS = ["a.tar", "b.tar", ".hidden.tar", "d/a.tar", "d/e/b.tar", "d/e/c.zip", "[1].tar", "d.tar/x"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain.tar", ["plain.tar"]),
        ("{0008..0011}.tar", ["0008.tar", "0009.tar", "0010.tar", "0011.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{1..10..4}", ["1", "5", "9"]),
        ("{c..a}", ["c", "b", "a"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("x{,.gz}", ["x", "x.gz"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("{a,b,{1..2}{x,y}}", ["a", "b", "1x", "1y", "2x", "2y"]),
        ("{a,b{c}}", ["a", "b{c}"]),
        ("{a}", ["{a}"]),
        ("a{b", ["a{b"]),
    ],
)
def test_braces_expand_as_in_bash(pattern, names):
    assert expand_braces(pattern) == names
    bash = subprocess.run(["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True)
    assert bash.stdout.splitlines() == names


def test_ranges_have_no_limit():
    assert len(expand_braces("s3://bucket/{00000..49999}.tar")) == 50_000


def test_library_for_braces_is_imported_on_first_use():
    code = "import sys, headrace; assert 'bracex' not in sys.modules; headrace.TarDataset('a.tar')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'bracex' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("*.tar", ["a.tar", "b.tar", "[1].tar"]),
        (".*.tar", [".hidden.tar"]),
        ("?.tar", ["a.tar", "b.tar"]),
        ("[!a].tar", ["b.tar"]),
        ("[[]1].tar", ["[1].tar"]),
        ("d/*.tar", ["d/a.tar"]),
        ("**/b.tar", ["b.tar", "d/e/b.tar"]),
        ("d/**", ["d/a.tar", "d/e/b.tar", "d/e/c.zip"]),
    ],
)
def test_globs_match_within_a_directory_and_two_stars_across(pattern, keys):
    assert [key for key in KEYS if glob_expression(pattern).fullmatch(key)] == keys


HIDDEN = ["a.txt", "d/a.txt", ".a.txt", ".d/a.txt", "d/.a.txt", "d/.e/a.txt", "d/e/a.txt", "x.a.txt"]


@pytest.mark.parametrize(
    "pattern", ["*.txt", "*/*.txt", "**/*.txt", "**", "?*.txt", "[.xa]*.txt", "d/**", ".*", ".d/*", "**/.*"]
)
def test_globs_match_hidden_names_as_pythons_glob(pattern, tmp_path):
    for key in HIDDEN:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("")
    found = {key for key in glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / key).is_file()}
    assert {key for key in HIDDEN if glob_expression(pattern).fullmatch(key)} == found
    everything = {key for key in HIDDEN if glob_expression(pattern, hidden=True).fullmatch(key)}
    if not pattern.endswith("**"):  # of pathlib's: directories only
        assert everything == {
            path.relative_to(tmp_path).as_posix() for path in tmp_path.glob(pattern) if path.is_file()
        }


def test_directory_of_shards_has_no_hidden_or_temporary_ones(tmp_path):
    for key in ("a.txt", "_b.txt", "part=1/c.txt", ".d.txt", ".ipynb_checkpoints/e.txt", "_temporary/0/f.txt"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text(f"{key}\n")
    assert list(LinesDataset(tmp_path)) == ["_b.txt", "a.txt", "part=1/c.txt"]
    assert list(LinesDataset(tmp_path / "_temporary" / "0")) == ["_temporary/0/f.txt"]
