"""Damaged files of all formats: each sample is right, or its error names a file; nothing hangs or takes memory.

Where nothing in a format shows a changed byte, a changed sample is right too: then only missing bytes are noticed.
"""

import contextlib
import os
import re
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ShardError, StoreError
from tests.unit.datasets.formats import FORMATS, plain
from tests.unit.shards.resuming import in_memory

# of each format; 2,000 before a release
MUTATIONS = int(os.environ.get("HEADRACE_MUTATIONS", "150"))
MEMORY = 1 << 30  # bytes that reading some kilobytes may take
EVIL = (
    0,
    1,
    2,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
EVIL_TEXTS = (
    b"0",
    b"-1",
    b"1",
    b"null",
    b'"x"',
    b"[]",
    b"1e9",
    b"9" * 30,
    b"NaN",
    b"4294967296",
    b'"../../x"',
)
LENGTHS = ("cut", "empty")  # mutations that change no byte


KINDS = ("cut", "longer", "empty", "flip", "number", "text", "other", "zeros")


@st.composite
def damaged(draw, files):
    """A mutation's name, the key of the file, and its bytes after it."""
    key = draw(st.sampled_from(sorted(files)))
    kind = draw(st.sampled_from(KINDS))
    size = len(files[key])
    # Headers are at the beginning or the end, and lie more.
    at = draw(
        st.one_of(
            st.integers(0, min(64, size)),
            st.integers(max(0, size - 64), size),
            st.integers(0, size),
        )
    )
    return kind, key, changed(draw, kind, files, files[key], at)


def changed(draw, kind, files, data, at):
    """The bytes of a file after a mutation at a place."""
    if kind == "cut":
        return data[:at]
    if kind == "longer":
        return data + data[at : at + draw(st.integers(1, 100))] + b"\0"
    if kind == "flip" and at < len(data):
        return (
            data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        )
    if kind == "number":
        width = draw(st.sampled_from([1, 2, 4, 8]))
        value = draw(st.sampled_from(EVIL)) & ((1 << 8 * width) - 1)
        written = data[:at] + value.to_bytes(width, "little") + data[at + width :]
        return written[: max(len(data), at)]
    if kind == "text" and (numbers := [*re.finditer(rb'-?\d+|"[^"]*"', data[:20_000])]):
        number = draw(st.sampled_from(numbers))
        return (
            data[: number.start()]
            + draw(st.sampled_from(EVIL_TEXTS))
            + data[number.end() :]
        )
    if kind == "zeros":
        return data[:at] + bytes(len(data[at:]))
    if kind == "other":
        return files[draw(st.sampled_from(sorted(files)))]
    return b""


@contextlib.contextmanager
def limited_memory():
    """An array for what a header claims raises `MemoryError`, which no dataset may."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(function, *arguments):
    """What a call gives, or one of the errors that it may raise."""
    try:
        return function(*arguments)
    except (ShardError, StoreError, ValueError) as error:
        return error


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_noticed(name):
    format = FORMATS[name]
    right = set(map(repr, map(plain, format.samples)))

    def read(store):
        dataset = format.open(store)
        indices = range(min(len(dataset), 2 * len(right)))
        together = outcome(dataset.__getitems__, indices)
        if isinstance(together, list):
            return together
        return [outcome(dataset.__getitem__, index) for index in indices]

    @settings(max_examples=MUTATIONS, database=None)
    @given(damaged(format.files))
    def check(mutation):
        kind, key, data = mutation
        with limited_memory():
            found = outcome(read, in_memory({**format.files, key: data}))
        for one in found if isinstance(found, list) else [found]:
            if isinstance(one, Exception) and not isinstance(
                one, StoreError
            ):  # which has a key, maybe a wrong one
                text = " ".join([str(one), *getattr(one, "__notes__", ())])
                assert any(file in text for file in format.files), (
                    f"{kind} of {key}: {one!r} names no file"
                )
            elif not isinstance(one, Exception) and (format.checked or kind in LENGTHS):
                assert repr(plain(one)) in right, f"{kind} of {key}: a wrong sample"

    check()
