"""The line of `headrace.progress` in a terminal, as its rows are seen, and in a file."""

import io
import logging
import os
import re
import sys
import types

import pytest

from headrace.telemetry.displays import (
    Field,
    NotebookDisplay,
    PlainDisplay,
    TerminalDisplay,
    choose_display,
    fitting,
)


class Terminal(io.TextIOWrapper):
    """A terminal; `other` is the program's second stream to the same one."""

    def __init__(self, raw=None, encoding="utf-8"):
        super().__init__(raw or io.BytesIO(), encoding=encoding, line_buffering=True)

    def isatty(self):
        return True

    def other(self):
        return Terminal(self.buffer)

    @property
    def written(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)

    @property
    def rows(self):
        """What is seen; the last row is the one with the cursor."""
        rows = [""]
        for part in re.findall(r"\r\x1b\[2K|\n|\x1b\[\d*m|[^\r\n\x1b]+|.", self.written, re.S):
            if part == "\n":
                rows.append("")
            elif part == "\r\x1b[2K":
                rows[-1] = ""
            elif not part.startswith("\x1b["):
                assert part != "\r"
                rows[-1] += part
        return rows


@pytest.fixture
def open_terminal(monkeypatch):
    """A function that makes both of the program's streams those of a new terminal; pytest sets them before a test."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    opened = []

    def open_terminal():
        terminal = Terminal()
        opened.extend((terminal, terminal.other()))
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", opened[-1])
        return terminal

    return open_terminal


def line(text):
    return [Field(text)]


def test_line_is_replaced_in_its_row_and_left_at_the_end(open_terminal):
    terminal = open_terminal()
    display = TerminalDisplay(terminal)
    display.show(line("batch 1"))
    display.show(line("batch 2"))
    assert terminal.rows == ["batch 2"]
    display.end(line("batch 3"))
    print("after")
    assert terminal.rows == ["batch 3", "after", ""]


def test_what_the_program_prints_is_above_the_line(open_terminal):
    terminal = open_terminal()
    handler = logging.StreamHandler()  # keeps the stream that it has found
    display = TerminalDisplay(terminal)
    display.show(line("batch 1"))
    print("loss", 0.5)
    handler.handle(logging.LogRecord("trainer", logging.INFO, "", 0, "saved", None, None))
    assert terminal.rows == ["loss 0.5", "saved", "batch 1"]
    display.end(line("batch 2"))
    assert terminal.rows == ["loss 0.5", "saved", "batch 2", ""]


def test_line_waits_for_the_end_of_a_row_that_the_program_has_begun(open_terminal):
    terminal = open_terminal()
    display = TerminalDisplay(terminal)
    display.show(line("batch 1"))
    print("evaluating ...", end="", flush=True)
    display.show(line("batch 2"))
    assert terminal.rows == ["evaluating ..."]
    print(" 0.9")
    assert terminal.rows == ["evaluating ... 0.9", "batch 2"]
    print("saving", end="", flush=True)
    display.end(line("batch 3"))
    assert terminal.rows == ["evaluating ... 0.9", "saving", "batch 3", ""]


def test_streams_are_as_before_after_the_end(open_terminal):
    terminal = open_terminal()
    display = TerminalDisplay(terminal)
    assert "write" in vars(sys.stdout)
    display.end(line("batch 1"))
    display.end(line("again"))
    assert "write" not in vars(sys.stdout)
    assert "write" not in vars(terminal)
    assert terminal.rows == ["batch 1", ""]


@pytest.mark.parametrize("inner_first", [True, False])
def test_line_inside_a_line(open_terminal, inner_first):
    terminal = open_terminal()
    outer, inner = TerminalDisplay(terminal), TerminalDisplay(terminal)
    outer.show(line("train"))
    inner.show(line("evaluate"))
    print("loss")
    for display, name in [(inner, "evaluated"), (outer, "trained")][:: 1 if inner_first else -1]:
        display.end(line(name))
    print("after")
    assert [row for row in terminal.rows if row != "train"][-2:] == ["after", ""]
    assert {"loss", "evaluated", "trained"} <= set(terminal.rows)


def test_write_in_a_forked_child_passes_through(open_terminal, monkeypatch):
    terminal = open_terminal()
    display = TerminalDisplay(terminal)
    display.show(line("batch 1"))
    with display._lock:  # as if another thread had it when the process was forked
        monkeypatch.setattr(os, "getpid", lambda: -1)
        print("child")
        display.end(line("batch 9"))
    assert "batch 9" not in terminal.written
    monkeypatch.undo()


def test_colors_unless_no_color_is_set(open_terminal, monkeypatch):
    terminal = open_terminal()
    fields = [Field("batch 1"), Field("waiting 50 %", tone="bad")]
    TerminalDisplay(terminal).end(fields)
    assert "\x1b[31mwaiting 50 %\x1b[0m" in terminal.written
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    TerminalDisplay(plain).end(fields)
    assert "\x1b" not in plain.written


def test_fields_of_the_highest_rank_are_left_out_first():
    fields = [Field("head", 5), Field("batch 1"), Field("rate", 2), Field("try this", 6)]
    assert [field.text for field in fitting(fields, 80, gap=2)] == ["head", "batch 1", "rate", "try this"]
    assert [field.text for field in fitting(fields, 22, gap=2)] == ["head", "batch 1", "rate"]
    assert [field.text for field in fitting(fields, 14, gap=2)] == ["batch 1", "rate"]
    assert [field.text for field in fitting(fields, 1, gap=2)] == ["batch 1"]


def test_characters_that_a_file_cannot_have_are_replaced():
    file = Terminal(encoding="ascii")
    PlainDisplay(file).show(line("5 µs"))
    assert file.written == "5 ?s\n"


def test_choice_of_the_display(open_terminal, monkeypatch):
    open_terminal()
    assert isinstance(choose_display(None), TerminalDisplay)
    assert isinstance(choose_display(io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_display(None), PlainDisplay)
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(choose_display(None), NotebookDisplay)
    shell = types.SimpleNamespace()  # IPython in a terminal
    assert isinstance(choose_display(None), PlainDisplay)
    monkeypatch.setattr(sys, "stderr", None)
    assert choose_display(None) is None
