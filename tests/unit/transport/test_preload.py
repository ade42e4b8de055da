"""Modules that functions need are imported once, in a template that workers are forked from."""

import importlib
import os
import signal
import sys
import textwrap

import pytest

import headrace as hr
from tests.datasets import Numbers

# What such a module does first: it notes the process that imports it.
NOTES_ITS_PROCESS = """
import os, pathlib
with open(pathlib.Path(__file__).with_suffix(".pids"), "a") as file:
    file.write(f"{os.getpid()}\\n")

def double(x):
    return 2 * x
"""
OF_TESTS = os.getpid()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write and import a module; gives it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def written(name, source=""):
        (tmp_path / f"{name}.py").write_text(NOTES_ITS_PROCESS + textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(name)
        return importlib.import_module(name)

    yield written
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def module(write):
    return write("preloaded")


def pids_of(module):
    """The processes that have imported it, without this one."""
    with open(module.__file__.replace(".py", ".pids")) as file:
        return [int(line) for line in file if int(line) != OF_TESTS]


def double_in_workers(fn, **options):
    with hr.DataLoader(
        Numbers(8), batch_size=4, num_workers=2, transform=fn, **options
    ) as loader:
        return [batch.tolist() for batch in loader]


DOUBLED = [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_module_is_imported_once_for_all_workers_and_the_next_loader(module):
    assert double_in_workers(module.double, placement="process") == DOUBLED
    assert len(pids_of(module)) == 1
    assert double_in_workers(module.double, placement="thread") == DOUBLED
    assert len(pids_of(module)) == 1


def test_edited_and_reloaded_module_is_imported_again(module, tmp_path):
    assert double_in_workers(module.double) == DOUBLED
    (tmp_path / "preloaded.py").write_text("def double(x):\n    return 20 * x\n")
    importlib.reload(module)
    assert double_in_workers(module.double) == [
        [10 * x for x in batch] for batch in DOUBLED
    ]


def test_output_of_a_module_is_printed_once(forks, tmp_path):
    (tmp_path / "preloaded.py").write_text("print('imported')\ndef same(x): return x\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import headrace as hr, preloaded
class Numbers(hr.AsyncDataset):
    def __len__(self): return 2
    async def aget(self, index): return index
def fn(x):
    print("called", flush=True)
    return preloaded.same(x)
print(next(iter(hr.DataLoader(Numbers(), batch_size=2, num_workers=2, transform=fn))).tolist())
"""
    printed = forks.run_source(program).stdout.splitlines()
    assert sorted(printed) == [
        "[0, 1]",
        "called",
        "called",
        "imported",
        "imported",
    ]  # here, and in the helper process


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(3)",
        "raise SystemExit",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_module_that_ends_the_template_or_leaves_it_with_threads_is_imported_by_the_workers(
    write, tmp_path, end
):
    once = tmp_path / "once"
    module = write(
        "preloaded",
        f"""
        if os.getpid() != {OF_TESTS} and not os.path.exists({str(once)!r}):
            open({str(once)!r}, "w").close()
            {end}
        """,
    )
    assert double_in_workers(module.double) == DOUBLED
    assert len(set(pids_of(module))) == 4  # a helper, two workers, the loader's


def test_template_destroys_no_thread_local_object_of_a_thread_of_a_module(
    write, tmp_path
):
    # The destructor of such an object may wait in a fork for ever: for threads that the fork lacks.
    destroyed = tmp_path / "destroyed"
    module = write(
        "preloaded",
        f"""
        import threading
        local, started, owner = threading.local(), threading.Event(), os.getpid()

        class Held:
            def __del__(self):
                if os.getpid() != owner:
                    open({str(destroyed)!r}, "w").close()

        def hold():
            local.held = Held()
            started.set()
            threading.Event().wait()

        if owner != {OF_TESTS}:
            threading.Thread(target=hold, daemon=True).start()
            started.wait()
        """,
    )
    assert double_in_workers(module.double, placement="thread") == DOUBLED
    assert not destroyed.exists()


def test_workers_start_after_their_template_was_killed(module):
    with hr.DataLoader(
        Numbers(8),
        batch_size=4,
        num_workers=2,
        transform=module.double,
        placement="thread",
    ) as loader:
        assert [batch.tolist() for batch in loader] == DOUBLED
        (template,) = pids_of(module)
        os.kill(template, signal.SIGKILL)
        assert [batch.tolist() for batch in loader] == DOUBLED
