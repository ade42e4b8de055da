"""The check of language in tools/: each kind of excess is found, and nothing else."""

import importlib

import pytest

from tests.documents import ROOT

PLAIN = '''"""Read a shard."""


def size(path):
    """Give the size of a shard in bytes."""
    return path.stat().st_size
'''
DENSE = f"NUMBERS = {list(range(9))}\n"
PRONOUNS = "Its size is that of the shard which it has. "
LONG_DOCSTRING = f'"""{"shard " * 17}"""\n'


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("check_language")


@pytest.fixture
def check(tool, tmp_path, capsys):
    """Write files into a project of their own; give the tool's exit status and lines."""

    def status_and_lines(files, *arguments):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        status = tool.main(arguments, tmp_path)
        return status, capsys.readouterr().out.splitlines()

    return status_and_lines


def test_plain_language_passes_without_a_line(check):
    files = {
        "src/shard.py": PLAIN,
        "docs/shards.md": "A shard has samples.",
        "README.md": "Shards.",
    }
    assert check(files) == (0, [])


def test_forbidden_words_are_printed_with_their_lines(tool, check):
    phrase, identifier = tool.PHRASES[0], tool.IDENTIFIERS[0]
    files = {
        "src/a.py": f"{PLAIN}# {phrase.title()} of a shard.\n",
        "tests/a.py": f"\n{identifier}()\n{identifier}_path()\n",
        "Makefile": f"{phrase}:\n",
    }
    status, printed = check(files)
    assert status == 1
    assert [line.split(",")[0] for line in printed] == [
        f"src/a.py:7: {phrase.title()}",
        f"tests/a.py:2: {identifier}",
        f"Makefile:1: {phrase}",
    ]


@pytest.mark.parametrize(
    ("name", "text", "excess"),
    [
        ("src/a.py", DENSE, "all of src: 21.00 tokens a line of code; the budget is 8.0"),
        ("src/a.py", f'URL = "{"a" * 100}"\n', "src/a.py: 1.00 lines over 100 columns"),
        ("src/a.py", f"# {PRONOUNS}\n", "src/a.py: 400.00 pronouns in 1,000 words"),
        (
            "src/a.py",
            f'"""Shards.\n\n{PRONOUNS}\n"""\n',
            "src/a.py: 363.64 pronouns in 1,000",
        ),
        (
            "docs/a.md",
            PRONOUNS,
            "docs/a.md: 400.00 pronouns in 1,000 words; the budget is 45",
        ),
        (
            "README.md",
            PRONOUNS + "shard " * 100,
            "all of docs: 36.36 pronouns in 1,000 words",
        ),
        ("src/a.py", LONG_DOCSTRING, "src/a.py: 17.00 words in a docstring's first line"),
        (
            "src/a.py",
            LONG_DOCSTRING,
            "all of src: 17.00 words in a docstring's first line",
        ),
    ],
)
def test_excess_is_printed_and_ends_with_status_1(check, name, text, excess):
    status, printed = check({name: text})
    assert status == 1
    assert [line for line in printed if line.startswith(excess)]


def test_code_in_documents_and_docstrings_is_no_prose(check):
    docstring = '"""Read a shard.\n\n    >>> it = that\n"""\n'
    files = {"src/a.py": docstring, "docs/a.md": "Shards.\n```python\nit = that\n```\n"}
    assert check(files) == (0, [])
