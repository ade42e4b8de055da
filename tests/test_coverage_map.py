"""Every test file has tests."""

from tests.documents import ROOT


def test_no_test_file_is_empty():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "def test_" not in path.read_text()]
    assert [path.name for path in files] == []
