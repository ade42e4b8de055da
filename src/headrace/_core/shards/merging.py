"""The states of all readers of a stream of parts, merged to one that any number of readers can load."""

from __future__ import annotations

from collections.abc import Sequence

from headrace._core.interface.resumable import State, expect_int, expect_list, expect_state
from headrace._core.shards.positions import PartPosition, opened_parts
from headrace._core.shards.redistribution import Division, Readers
from headrace._core.shards.windows import WindowRest, reader_of
from headrace.errors import StateError

_SAME = ("of", "epoch", "repetition", "divisions")


def merge_part_states(states: Sequence[State]) -> State:
    """Merge the states of the readers of a stream: each reader that loads it continues with its share of what is left.

    Args:
        states: of the iterators of all readers (the ranks, or in a torch loader the workers of all ranks) at the same
            time, in any order.

    Returns:
        A state for `PartIterator.load_state_dict`, the same for each new reader.

    Raises:
        StateError: a reader is missing or there twice, or the states are not of the same stream and epoch.
    """
    by_reader = _by_reader(states)
    first = by_reader[0]
    _, readers = reader_of(first)
    of, divisions = expect_state(first, "of"), expect_list(first, "divisions")
    windows: list[State] = []
    for state in by_reader:
        windows += [WindowRest.from_state(one).to_state() for one in expect_list(state, "windows")]
    streams = []
    for index, state in enumerate(by_reader):
        stream, window = _after_window(expect_state(state, "stream"), index, readers, len(divisions))
        streams.append(stream)
        if window is not None:
            windows.append(window.to_state())
    left = sum(WindowRest.from_state(one).size for one in windows)
    declared = of.get("samples_per_rank") is not None
    division = _division(streams, readers, left, declared=declared, by_sample=of.get("split") == "samples")
    return {
        "of": of,
        "epoch": expect_int(first, "epoch"),
        "repetition": expect_int(first, "repetition"),
        "divisions": [*divisions, division.to_state()],
        "reader": None,
        "windows": windows,
        "stream": _common(streams) if of.get("split") == "samples" else None,
    }


def is_part_state(state: State) -> bool:
    """Whether a state is that of a reader of a stream of parts, or merged of all its readers."""
    return state.keys() >= {"of", "reader", "divisions"}


def _by_reader(states: Sequence[State]) -> list[State]:
    if not states:
        raise StateError("there are no states to merge")
    found: dict[int, State] = {}
    readers = None
    for state in states:
        expect_state({"state": state}, "state")
        if state.get("reader") is None:
            raise StateError("one of the states is merged already, or damaged: merge those that ranks have saved")
        index, of = reader_of(state)
        if readers not in (None, of):
            raise StateError(f"the states are not of all ranks at one time: {readers} and {of}")
        if index in found:
            raise StateError(f"the state of reader {index} of {of.count} is there twice")
        readers, found[index] = of, state
        for name in _SAME:
            if state.get(name) != states[0].get(name):
                what = f"{name!r} is {states[0].get(name)!r} and {state.get(name)!r}"
                raise StateError(f"the states are not of one stream in one epoch: {what}")
    assert readers is not None
    missing = sorted(set(range(readers.count)) - found.keys())
    if missing:
        listed = ", ".join(map(str, missing))
        raise StateError(f"states are missing: those of readers {listed} of {readers.count}, from 0")
    return [found[index] for index in range(readers.count)]


def _after_window(stream: State, index: int, readers: Readers, divisions: int) -> tuple[State, WindowRest | None]:
    """The state after the current shuffle window, and what is left of that."""
    if stream.get("operation") != "shuffle":
        return stream, None
    if stream.get("rest") is None:
        return expect_state(stream, "inner"), None
    rest = expect_state(stream, "rest")
    given, length = expect_int(rest, "given"), expect_int(rest, "length")
    shuffle = {**stream, "rest": {**rest, "after": None}}
    return expect_state(rest, "after"), WindowRest(index, readers, divisions, given, max(given, length), shuffle)


def _common(streams: list[State]) -> State:
    """The position of readers that all read the whole stream."""
    leaves = []
    for stream in streams:
        leaf = _unwrapped(stream, "equal length")
        if leaf.get("operation") == "split" and expect_int(leaf, "given"):
            raise StateError("a state was saved after an error, between two samples of it: merge those saved later")
        leaves.append(_unwrapped(leaf, "split"))
    places = [_place(leaf) for leaf in leaves]
    if any(place != places[0] for place in places):
        raise StateError(
            "the ranks are at different positions in the stream: merge states saved after the same step. In the first "
            "steps after other numbers of ranks, some may still give samples of the shuffle buffers of before: save a "
            "step later"
        )
    return leaves[0]


def _place(leaf: State) -> tuple[int, list[tuple[int, int]]]:
    opened, positions = opened_parts(leaf)
    return opened, [(one.part, one.given) for one in positions]


def _unwrapped(state: State, operation: str) -> State:
    return expect_state(state, "inner") if state.get("operation") == operation else state


def _division(streams: list[State], readers: Readers, windows: int, *, declared: bool, by_sample: bool) -> Division:
    opened: list[int] = []
    rests: list[PartPosition] = []
    left = 0
    for stream in streams:
        again = False
        if stream.get("operation") == "equal length":
            left += expect_int(stream, "left")
            again = expect_int(stream, "restarts") > 0
        if by_sample:
            opened.append(0)
            continue
        count, positions = opened_parts(_unwrapped(stream, "equal length"))
        opened.append(_ALL if again else count)
        rests += [] if again else positions
    return Division(readers, tuple(opened), tuple(rests), left if declared else None, windows)


_ALL = 1 << 53  # more parts than a reader can have: it has read all of its own, and reads them again
