"""The parity table in the docs agrees with the tests: every setting has a test, or a reason."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.parity import table
from tests.parity.harness import NAMES, parity


def test_parity_page_is_up_to_date():
    checked = subprocess.run([sys.executable, "-m", "tests.parity.table", "--check"], cwd=table.HERE.parents[1],
                             capture_output=True, text=True)  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def collected(test, row="order"):
    """The items that pytest makes of a test with the decorator, as far as the table looks at them."""
    proof, settings = (next(m for m in test.pytestmark if m.name == name) for name in ("parity", "parametrize"))
    return [
        SimpleNamespace(
            path=table.HERE / f"test_{row}.py",
            nodeid=f"{row}::{setting}",
            callspec=SimpleNamespace(params={"setting": setting}),
            get_closest_marker=lambda name: proof,
        )
        for setting in settings.args[1]
    ]


def decorated(behaviour="a line", **options):
    def of_a_file(same):
        """Never run: the table looks at its marks."""

    return parity(behaviour, **options)(of_a_file)


def test_line_names_the_settings_without_a_test_and_the_reason():
    items = collected(decorated(not_for={NAMES[0]: "it sleeps", NAMES[2]: "it sleeps", NAMES[3]: "it eats"}))
    line = f"- a line (*{NAMES[0]} and {NAMES[2]}: it sleeps; {NAMES[3]}: it eats*)"
    assert line in table.rendered(items).splitlines()


def test_tests_with_the_same_line_fill_it_together():
    torchs, others = ({name: "" for name in NAMES if name.startswith(kind)} for kind in ("torch", "async"))
    items = collected(decorated(not_for=torchs)) + collected(decorated(not_for=others))
    assert "- a line" in table.rendered(items).splitlines()


def test_setting_without_a_test_or_a_reason_is_an_error():
    with pytest.raises(ValueError, match="no test and no reason"):
        table.rendered(collected(decorated(not_for={NAMES[0]: ""})))


def test_setting_with_two_answers_is_an_error():
    contradiction = collected(decorated(not_for={NAMES[0]: "it sleeps"})) + collected(decorated())
    with pytest.raises(ValueError, match="it sleeps"):
        table.rendered(contradiction)


def test_file_without_a_row_is_an_error():
    with pytest.raises(ValueError, match="not named after a row"):
        table.rendered(collected(decorated(), row="weather"))
