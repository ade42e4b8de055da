"""Entry point of the command `headrace`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from headrace._version import __version__
from headrace.errors import HeadraceError, MissingExtraError

OK, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130  # 130 = 128 + SIGINT, as in a shell


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    Args:
        argv: arguments of the command; by default ``sys.argv[1:]``.

    Returns:
        0 for success. 1 for a failure. 2 for bad arguments
        and for missing packages. 130 for an interrupt.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return OK
    try:
        command = importlib.import_module(f"headrace.cli.{arguments.command}")
        return OK if command.run(arguments) else FAILED
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except (HeadraceError, OSError, ValueError) as error:
        status = UNUSABLE if isinstance(error, ValueError | MissingExtraError) else FAILED
        return _complain(" ".join(str(error).split()) or type(error).__name__, status)


def _complain(message: str, status: int) -> int:
    print(f"headrace: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="An asyncio-native streaming data loader for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", dest="command")
    index = commands.add_parser(
        "index",
        help="index shards, so that a loader reads them in any order, on any number of GPUs",
        description="Reads each shard once, and writes one index, which TarDataset.index, "
        "LinesDataset.index and TFRecordDataset.index find. "
        "After an interruption the same command continues.",
    )
    add = index.add_argument
    add(
        "url",
        metavar="URL",
        help="shards: a directory, a glob, or with braces: s3://bucket/{0000..0127}.tar",
    )
    add(
        "--format",
        choices=("tar", "lines", "tfrecord"),
        help="of the shards (by the endings of their names)",
    )
    add(
        "--output",
        metavar="PATH",
        help="path or URL of the index (headrace.index in the folder of the shards)",
    )
    about = (
        "function that gives the length of a sample, as its number of tokens; "
        "the index keeps lengths"
    )
    add("--length", metavar="MODULE:FUNCTION", help=about)
    add(
        "--processes",
        type=int,
        metavar="N",
        help="that read shards (as many as there are cores)",
    )
    about = (
        "read the I-th of N shares, on one of N machines; then run without this option"
    )
    add("--part", type=_part, metavar="I/N", help=about)
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is no share, as 1/4 to 4/4")
    return int(number), int(count)
