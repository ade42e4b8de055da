"""What `headrace bench` prints, at the widths of terminals and in a pipe, and what it says that a host needs."""

import asyncio
import io
from types import SimpleNamespace

import pytest

from headrace.cli.bench.limits import Ceiling
from headrace.cli.bench.needs import demands, needs_of
from headrace.cli.bench.reads import Listing
from headrace.cli.bench.results import Results
from headrace.cli.bench.search import Search
from headrace.cli.bench.text import size, throughput, write_text
from headrace.cli.bench.trials import Trial
from headrace.options import MEMORY_BUDGET

WHOLE = (0.0212, 0.031, 0.187)
OPTIONS = {"endpoint": "http://127.0.0.1:9000", "secret_access_key": "hush", "client_options": {"allow_http": True}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Sizes:
    """Of a dataset of 2,000 objects of 56 kB."""

    def __len__(self):
        return 2000

    def _size(self, position):
        return 56_000


def trial(concurrency, rate, **values):
    values = {"whole": WHOLE, "cores": 0.5, "loop": 0.1, **values}
    return Trial(concurrency, 1.0, rate, 56_000 * rate, **values)


def results(rate=lambda concurrency: min(50 * concurrency, 2000), halves=None, **values):
    left = iter(range(10_000, 0, -1))

    async def measure(concurrency, seconds):
        return trial(concurrency, rate(concurrency), **values)

    search = Search(measure, 2048, lambda: next(left))
    asyncio.run(search.run())
    found = Results("s3://bucket/train", OPTIONS, 8, None, 2.0)
    found.listing = Listing(Sizes(), True, 3, 0.4, [(number, 0, 56_000) for number in range(2000)])
    found.trials = SimpleNamespace(batch_size=64, memory_budget=lambda concurrency: MEMORY_BUDGET)
    found.ceiling, found.search = Ceiling(2048, "several loaders"), search
    found.unloaded = trial(4, 200, first=WHOLE)
    found.loaded = trial(search.best, 2000, first=WHOLE)
    found.halves = halves or trial(2 * search.best, 4000)
    return found


def shown(found, stream, monkeypatch, columns=80, **environment):
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": str(columns), **environment}.items():
        monkeypatch.setenv(name, value)
    write_text(found, stream)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_into_a_terminal(columns, monkeypatch):
    text = shown(results(throttled=100), Terminal(), monkeypatch, columns, NO_COLOR="1")
    assert max(map(len, text.splitlines())) < columns
    assert "\033" not in text


def test_best_setting_is_colored_on_a_terminal_only(monkeypatch):
    assert "\033[32m" in shown(results(), Terminal(), monkeypatch)
    assert "\033" not in shown(results(), io.StringIO(), monkeypatch)


def test_lines_are_not_wrapped_in_a_pipe(monkeypatch):
    lines = shown(results(), io.StringIO(), monkeypatch).splitlines()
    assert next(line for line in lines if line.startswith("remedy")).endswith("if the store gives more")


def test_text_can_be_written_to_a_stream_without_unicode(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_text(results(), stream)
    assert b"# best" in raw.getvalue()


def test_secrets_are_not_shown(monkeypatch):
    text = shown(results(), io.StringIO(), monkeypatch)
    assert '"secret_access_key": "…"' in text
    assert "hush" not in text


def test_throttling_has_a_column_where_it_occurred(monkeypatch):
    assert "throttled" not in shown(results(), io.StringIO(), monkeypatch)
    assert "throttled" in shown(results(throttled=3), io.StringIO(), monkeypatch)


def test_results_of_an_interrupted_search_are_shown(monkeypatch):
    found = results()
    found.loaded = found.halves = None
    text = shown(found, io.StringIO(), monkeypatch)
    assert "Interrupted: these are the results so far." in text
    assert "limit   not known" in text


def test_setting_that_failed_is_named_with_the_error(monkeypatch):
    found = results()
    found.search.trials.append(Trial(512, failed="reading object 'a': too many open files"))
    assert "With 512 in flight: reading object 'a': too many open files" in shown(found, io.StringIO(), monkeypatch)


def test_limit_and_remedy_are_named(monkeypatch):
    assert "limit   bandwidth: 112 MB/s" in shown(results(), io.StringIO(), monkeypatch)
    requests = results(halves=trial(80, 2000))
    assert "limit   requests: 2,000 requests/s" in shown(requests, io.StringIO(), monkeypatch)
    assert "limit   the CPU of this machine" in shown(results(loop=0.95), io.StringIO(), monkeypatch)


def test_rate_of_an_engine_follows_from_its_event_loop_and_is_not_claimed_of_several(monkeypatch):
    found = results(loop=0.25)
    text = shown(found, io.StringIO(), monkeypatch)
    assert "engines only one was tried. Its event loop computed 125 µs for each: at most 6,400 objects/s of an" in text
    assert found.to_dict()["engine_rate"] == pytest.approx(0.8 / 125e-6)


def test_engine_whose_cpu_time_is_not_known_is_not_judged(monkeypatch):
    found = results(loop=0.0)
    assert "only one was tried" not in shown(found, io.StringIO(), monkeypatch)
    assert found.to_dict()["engine_rate"] is None


def test_demand_of_mlperf_storage_is_that_of_its_configurations():
    found = {demand.name: demand.nbytes / 1e9 for demand in demands(8, None, 56_000)}
    assert found == pytest.approx({"ResNet-50": 1.474, "CosmoFlow": 4.526, "3D U-Net": 22.87}, rel=1e-3)


def test_needs_follow_from_latency_and_cpu_time():
    best = trial(40, 2000, cores=0.5, loop=0.2)
    (demand,) = demands(4, 5000, 56_000)
    need = needs_of(demand, best, trial(4, 190))
    assert need.share == pytest.approx(0.1)
    assert need.in_flight == 424  # 20,000 a second times 21.2 ms
    assert need.cores == pytest.approx(5.0)
    assert need.engines == 3  # of 0.8 cores each, for 2.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [(size(999), "999 B"), (size(56_000), "56 kB"), (size(1.5e9), "1.5 GB"), (throughput(2e9), "2 GB/s")],
)
def test_sizes_have_decimal_units(text, shown):
    assert text == shown
