"""The tables of docs/benchmarks.md: a host with 8 GPUs, and 64 of them; and how well the simulation predicts.

`--check` compares it with real loaders of 1, 2 and 4 engines. Without options all of it.

    python benchmarks/simulate_scale.py --host
    python benchmarks/simulate_scale.py --cluster
    python benchmarks/simulate_scale.py --check
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from harness import claim, describe_machine, parse_arguments
from simulated_gpus import simulated_cluster, simulated_host
from simulated_runs import SCENARIOS, compare
from sizing import cluster_tables, cost_table, host_tables, other_costs, table

MARGIN = 0.1  # of the medians of the errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", action="store_true", help="one host with 8 GPUs")
    parser.add_argument(
        "--cluster", action="store_true", help="64 such hosts, 10⁹ objects"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="real loaders of 1, 2 and 4 engines beside the simulation",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the real loaders")
    parser.add_argument(
        "--limits",
        nargs="+",
        default=[each.limit for each in SCENARIOS],
        help="of --check",
    )
    arguments = parse_arguments(parser, rounds=1, limits=["latency, spread"])
    everything = not (arguments.host or arguments.cluster or arguments.check)
    if arguments.host or everything:
        print(cost_table(), other_costs(), *host_tables(), simulated_host(), sep="\n\n")
    if arguments.cluster or everything:
        print("", *cluster_tables(), simulated_cluster(), sep="\n\n")
    if arguments.check or everything:
        print("\n" + describe_machine())
        check(arguments.rounds, arguments.limits)


def check(rounds: int, limits: Sequence[str]) -> None:
    """Print predicted beside measured, and claim."""
    found = [
        each
        for scenario in SCENARIOS
        if scenario.limit in limits
        for each in compare(scenario, rounds)
    ]
    print(
        table(
            (
                "limit",
                "engines",
                "nominal",
                "predicted",
                "measured",
                "error",
                "of single rounds",
            ),
            [
                (
                    each.limit,
                    f"{each.engines}",
                    f"{each.nominal:.1f}",
                    f"{each.predicted:.1f}",
                    f"{each.measured:.1f}",
                    f"{each.error:+.1%}",
                    f"{min(each.errors):+.0%} to {max(each.errors):+.0%}",
                )
                for each in found
            ],
        )
    )
    errors = sorted(abs(each.error) for each in found)
    within = sum(error <= MARGIN for error in errors)
    claim(
        "rate of 1, 2 and 4 engines, simulated, of the measured",
        aim=f"within {MARGIN:.0%}",
        reached=f"{within} of {len(errors)} within {MARGIN:.0%}; median of the errors {median(errors):.1%}, "
        f"greatest {errors[-1]:.0%}",
        met=within == len(errors),
    )


if __name__ == "__main__":
    main()
