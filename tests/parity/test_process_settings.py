"""Settings of the trainer's process hold in workers of async datasets too: the same program, with torch's loader."""

import json

import pytest

# Each function prints a worker's view of the settings above it.
SETTINGS = """
import headrace_test_module
warnings.simplefilter("ignore", UserWarning)
logging.getLogger("imported").setLevel(logging.NOTSET)
def imports_that_change_settings():
    headrace_test_module
    warnings.warn("ignored")
    return logging.getLogger("imported").level

sys.argv[:] = ["train.py", "--lr", "0.1"]
def sys_argv(): return sys.argv

sys.setrecursionlimit(4321)
def recursion_limit(): return sys.getrecursionlimit()

class Ours(UserWarning): pass
warnings.simplefilter("error", Ours)
warnings.filterwarnings("error", "careful", FutureWarning)
def warning_filters():
    raised = []
    for warning in (Ours("x"), FutureWarning("careful"), FutureWarning("other")):
        try: warnings.warn(warning)
        except Warning as error: raised.append(repr(error))
    return raised

torch.set_default_dtype(torch.float64)
def default_dtype(): return torch.zeros(1).dtype, torch.tensor(1.5).dtype

torch.set_num_threads(2)
def torch_threads(): return torch.get_num_threads()

torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("high")
def deterministic_algorithms():
    return (torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_float32_matmul_precision())

import socket
socket.setdefaulttimeout(12.5)
def sockets(): return socket.getdefaulttimeout()

logging.getLogger().setLevel(logging.ERROR)
logging.getLogger("a").setLevel(logging.DEBUG)
logging.getLogger("c").disabled = True
logging.disable(logging.DEBUG)
logging.addLevelName(35, "NOTICE")
def logging_levels():
    names = "a", "a.b", "c", "d"
    return [[logging.getLogger(name).isEnabledFor(level) for level in (10, 20, 40)] for name in names], \\
           logging.getLevelName(35)
"""

MODULE = """
import logging, warnings
warnings.simplefilter("error", UserWarning)
logging.getLogger("imported").setLevel(logging.DEBUG)
"""
PROGRAM = f"""
import json, logging, sys, warnings
sys.path.insert(0, FOLDER)
import torch
import headrace as hr
{SETTINGS}
def seen(_):
    functions = [imports_that_change_settings, sys_argv, recursion_limit, warning_filters, default_dtype, torch_threads,
                 deterministic_algorithms, sockets, logging_levels]
    return {{fn.__name__: str(fn()) for fn in functions}}
class Seen(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return seen(index)
class AsyncSeen(hr.AsyncDataset):
    def __len__(self): return 2
    async def aget(self, index): return seen(index)
class Numbers(hr.AsyncDataset):
    def __len__(self): return 2
    async def aget(self, index): return index
print(json.dumps(list(LOADER)))
"""
LOADERS = {
    "torch dataset": "hr.DataLoader(Seen(), None, num_workers=2)",
    "transform": "hr.DataLoader(Numbers(), None, num_workers=2, transform=seen)",
    "aget": "hr.DataLoader(AsyncSeen(), None, num_workers=2)",
    "thread placement": "hr.DataLoader(Numbers(), None, num_workers=2, transform=seen, placement='thread')",
    "threads of no workers": "hr.DataLoader(Numbers(), None, transform=seen, placement='process')",
    "forked": "hr.DataLoader(Numbers(), None, num_workers=2, transform=seen, multiprocessing_context='fork')",
}


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "headrace_test_module.py").write_text(MODULE)

    def ran(loader):
        done = forks.run_source(
            f"FOLDER = {str(folder)!r}\n{PROGRAM.replace('LOADER', loader)}"
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ran


@pytest.fixture(scope="module")
def with_torch(run):
    return run("torch.utils.data.DataLoader(Seen(), None, num_workers=2)")


@pytest.mark.parametrize("name", LOADERS)
def test_settings_of_the_process_hold_as_in_torch_wherever_user_code_runs(
    run, with_torch, name
):
    assert run(LOADERS[name]) == with_torch
