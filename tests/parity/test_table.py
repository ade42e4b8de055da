"""The parity table in the docs agrees with the tests: every setting has a test, or a reason."""

import subprocess
import sys

from tests.parity import table


def test_parity_page_is_up_to_date():
    checked = subprocess.run([sys.executable, "-m", "tests.parity.table", "--check"], cwd=table.HERE.parents[1],
                             capture_output=True, text=True)  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
