"""Run the command `headrace` as `python -m headrace`."""

import sys

from headrace.cli.main import main

if __name__ == "__main__":  # a spawned worker imports this module too
    sys.exit(main())
