"""The check of words in `make lint`: what it finds, and that nothing is left of what it refuses."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "tools/check_language.py"
SPEC = importlib.util.spec_from_file_location("check_language", PATH)
check_language = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_language)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The loop is\n" + "to" + "ld of it.", [(2, "to" + "ld")]),
        ("No" + "body waits.", [(1, "No" + "body")]),
        ("untold, throttled, heard_of, unrounded, a Rounder", []),
        ("raise Worker" + "Died(pid)", [(1, "Worker" + "Died")]),
        ("raise WorkerDiedError(pid)", []),
    ],
)
def test_refused_words_are_found_as_whole_words(text, found):
    assert list(check_language.occurrences(text)) == found


def test_no_refused_word_is_left(capsys):
    assert check_language.main() == 0, capsys.readouterr().out
