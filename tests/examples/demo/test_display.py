"""What the user sees, on a terminal and in a log."""

import io

from rich.console import Console

from demo.display import Display


def test_a_log_gets_plain_lines():
    sink = io.StringIO()
    display = Display(Console(file=sink, highlight=False))
    display.title("headrace demo", "digits")
    display.fact("store", "http://127.0.0.1:1")
    with display.live("1/6", 23, "batches") as live:
        live.update(1, "10 samples/s")
    display.line("x" * 200)
    display.table(("loader", "samples/s"), [("torch", "95"), ("headrace", "5,808")])
    text = sink.getvalue()
    assert "\x1b" not in text
    assert "x" * 200 in text, "a log is not wrapped"
    assert text.index("digits") < text.index("store") < text.index("headrace   ")


def test_the_live_line_shows_progress_and_leaves_no_trace():
    sink = io.StringIO()
    display = Display(Console(file=sink, force_terminal=True, width=100, highlight=False))
    with display.live("1/6", 23, "batches") as live:
        live.update(11, "10 samples/s")
    text = sink.getvalue()
    assert "11/23 batches" in text
    assert "10 samples/s" in text
    assert text.endswith("\x1b[2K"), "the line is erased, and the next one is written over it"
