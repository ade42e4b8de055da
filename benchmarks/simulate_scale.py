"""The tables of docs/scale.md: a host with 8 GPUs, and 64 of them with a thousand million objects.

Without options it prints both.

    python benchmarks/simulate_scale.py --host
    python benchmarks/simulate_scale.py --cluster
"""

from __future__ import annotations

import argparse

from harness import parse_arguments
from sizing import cluster_tables, cost_table, host_tables, other_costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="one host with 8 GPUs")
    parser.add_argument("--cluster", action="store_true", help="64 such hosts, 10⁹ objects")
    arguments = parse_arguments(parser)
    everything = not (arguments.host or arguments.cluster)
    if arguments.host or everything:
        print(cost_table(), other_costs(), *host_tables(), sep="\n\n")
    if arguments.cluster or everything:
        print("", *cluster_tables(), sep="\n\n")


if __name__ == "__main__":
    main()
