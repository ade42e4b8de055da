"""Every test file has tests."""

from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_file_is_empty():
    files = [path for path in TESTS.rglob("test_*.py") if "def test_" not in path.read_text()]
    assert [path.relative_to(TESTS).as_posix() for path in files] == []
