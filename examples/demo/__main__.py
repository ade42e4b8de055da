"""The demo's command: ``python examples/demo --help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # workers get the path too

from demo import missing_packages


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Streams 1,797 handwritten digits from an object store that runs beside it, trains a small CNN on "
        "them, and compares the loading of an epoch with torch's DataLoader.",
    )
    add = parser.add_argument
    add(
        "--latency",
        type=float,
        default=20.0,
        metavar="MS",
        help="the store's time to first byte (20)",
    )
    add(
        "--epochs",
        type=int,
        default=6,
        metavar="N",
        help="passes over the training objects (6)",
    )
    add("--batch-size", type=int, default=64, metavar="N", help="samples in a batch (64)")
    add(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes for decoding and augmenting (2)",
    )
    add(
        "--concurrency",
        type=_concurrency,
        default=256,
        metavar="N",
        help='fetches in flight, or "auto" (256)',
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the order, the augmentation and the model (0)",
    )
    add(
        "--copies",
        type=int,
        default=10,
        metavar="N",
        help="of each object, for the comparison of loaders (10)",
    )
    options = vars(parser.parse_args())
    if missing := missing_packages():
        print(
            f"this needs {', '.join(missing)}: pip install 'headrace[demo]'",
            file=sys.stderr,
        )
        return 2
    print("demo: importing PyTorch, which takes some seconds", flush=True)
    from demo.display import Display
    from demo.job import run_demo
    from demo.options import DemoOptions

    return (
        0
        if run_demo(
            DemoOptions(**{**options, "latency": options["latency"] / 1000}), Display()
        )
        else 1
    )


def _concurrency(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
