"""Width and colors of the terminal that a program prints to."""

import io

from headrace._core.terminal import columns, is_colored


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_width_is_that_of_the_environment_else_80(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert columns(Terminal()) == 120
    monkeypatch.setenv("COLUMNS", "wide")
    assert columns(Terminal()) == 80
    monkeypatch.delenv("COLUMNS")
    assert columns(Terminal()) == 80


def test_colors_only_on_a_terminal_without_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert is_colored(Terminal())
    assert not is_colored(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_colored(Terminal())
