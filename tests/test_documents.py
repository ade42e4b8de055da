"""Documents: their programs run as they stand, but for addresses, and their links lead somewhere."""

import asyncio
import contextlib
import gzip
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

import asyncpg
import numpy as np
import pytest
import redis
from aiohttp import web
from PIL import Image

import headrace
from headrace._eventloop.loop_thread import LoopThread
from headrace.telemetry.report import _LIMITS as LIMITS
from tests.documents import DOCUMENTS, ROOT, headings_of, links_of, python_blocks, text_of
from tests.rendezvous import Rendezvous

PROJECT = tomllib.loads(text_of("pyproject.toml"))
README = text_of("README.md")
_, SAVING = python_blocks("README.md")
PHOTOS, BLOCKING, READINGS, IMAGES, RECORDS, EVENTS, PAGES = python_blocks(
    "docs/your-own-dataset.md"
)
WAITS = "docs/my-gpu-waits.md"
REPORT, HEADSPACE, METRICS, TRACE = python_blocks(WAITS)
RANKS, BY_COST, TENSOR_PARALLEL, ENGINES, _ = python_blocks("docs/ranks.md")
(ON_DEVICE,) = python_blocks("docs/devices.md")
FROM_TORCH, FROM_WEBDATASET, FROM_LITDATA, FROM_MOSAIC, FROM_TORCHDATA = python_blocks(
    "docs/coming-from.md"
)
KILLED, *RESUMING = python_blocks("docs/resuming.md")
(ON_ERROR,) = python_blocks("docs/reference/errors.md")
RANDOMIZED, SEEDED = python_blocks("docs/reference/options.md")


def located(program, written, real):
    """The program with a real address in place of the one on the page."""
    assert written in program
    return program.replace(written, real)


@contextlib.contextmanager
def served(path, handler):
    """Serve one route of an aiohttp application, and give the port."""

    async def start():
        app = web.Application()
        app.router.add_get(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    loop = LoopThread("served")
    runner, port = loop.run(start())
    try:
        yield port
    finally:
        loop.run(runner.cleanup())
        loop.close(1.0)


def test_checkpoint_lines_of_the_readme_continue_with_the_next_batch(run, tmp_path):
    setup = f"import os, torch, headrace as hr\nos.chdir({str(tmp_path)!r})\nmodel = torch.nn.Linear(1, 1)\n"
    make = "loader = hr.DataLoader(torch.arange(8), batch_size=2, shuffle=True, seed=0)\n"
    saved, restored = SAVING.split("# … and in the next job, before its first batch:\n")
    begin, rest = (
        "batches = iter(loader); next(batches)\n",
        "print([batch.tolist() for batch in batches])\n",
    )
    printed = "".join(
        run(
            setup
            + make
            + begin
            + saved
            + rest
            + make
            + restored
            + "batches = loader\n"
            + rest
        )
    )
    uninterrupted, resumed = json.loads(printed.replace("]][[", "]],[[").join("[]"))
    assert resumed == uninterrupted
    assert len(resumed) == 3


def test_program_for_tools_that_write_code_runs(run):
    (program,) = python_blocks("AGENTS.md")
    assert run(program) == ["15"]


def test_every_page_is_on_the_site_and_in_the_list_for_language_models():
    pages = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")
    } - {"docs/index.md"}
    assert pages | {"README.md", "AGENTS.md", "docs/design/README.md", "examples"} == set(
        links_of(text_of("llms.txt"))
    )
    listed = re.findall(r"^[A-Za-z/-]+$", text_of("docs/index.md"), re.M)
    listed = [page for page in listed if not page.startswith(("reference/", "gallery/"))]
    assert {f"docs/{page}.md" for page in listed} == pages | {"docs/design/README.md"}


def test_metadata_for_citations_agrees_with_the_package():
    citation, zenodo = text_of("CITATION.cff"), json.loads(text_of(".zenodo.json"))
    project = PROJECT["project"]
    (author,) = project["authors"]
    for line in (
        f"version: {headrace.__version__}",
        f'title: "{zenodo["title"]}"',
        f"license: {project['license']}",
        f"  - name: {author['name']}",
        f'repository-code: "{project["urls"]["Repository"]}"',
        *(f"  - {keyword}" for keyword in zenodo["keywords"]),
    ):
        assert line in citation.splitlines()
    assert zenodo["license"] == project["license"]
    assert zenodo["creators"] == [author]


def test_reference_has_every_public_name():
    reference = "".join(
        path.read_text() for path in (ROOT / "docs/reference").glob("*.md")
    )
    named = set(re.findall(r"^\.\. auto\w+:: headrace\.([\w.]+)$", reference, re.M))
    errors = {"HeadraceError", "StateError", "StoreError"}  # of headrace.errors
    assert set(headrace.__all__) - errors - {"__version__"} <= named
    assert {"decode", "errors", "testing", "types"} <= named


@pytest.mark.parametrize(
    ("program", "sums"),
    [
        (PHOTOS, ["0", str(sum(range(200))), str(sum(range(200)))]),
        (BLOCKING, [str(sum(range(200)))]),
    ],
)
def test_programs_with_a_client_read_each_sample(run, program, sums):
    async def photo(request):
        return web.Response(body=bytes(int(request.match_info["index"])))

    with served("/{index}", photo) as port:
        printed = run(
            located(program, "http://localhost:8080", f"http://127.0.0.1:{port}")
        )
    assert printed == sums


def test_program_of_a_stream_with_a_state_continues_after_a_restart(run):
    async def page(request):
        return web.json_response(
            [{"id": 7 * int(request.match_info["page"]) + number} for number in range(7)]
        )

    with served("/{page}", page) as port:
        printed = run(
            located(EVENTS, "http://localhost:8080", f"http://127.0.0.1:{port}")
        )
    assert " ".join(printed) == "17 batches, and 18 in the next epoch"


def found(name, *folders):
    """The path of a server's program, or None; Debian keeps PostgreSQL's out of PATH."""
    return shutil.which(name) or next(
        (str(path) for folder in folders for path in Path("/usr/lib").glob(folder)), None
    )


@pytest.fixture
def postgres():
    initdb, server = (
        found(name, f"postgresql/*/bin/{name}") for name in ("initdb", "postgres")
    )
    if initdb is None or server is None:
        pytest.skip("needs Debian's postgresql")
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg-")))
        if user:
            shutil.chown(folder, user)
        common = {
            "user": user,
            "cwd": folder,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        data = str(folder / "data")
        subprocess.run(
            [initdb, "-D", data, "-U", "reader", "--auth=trust", "--no-sync"],
            check=True,
            **common,
        )
        control = [str(Path(initdb).with_name("pg_ctl")), "-D", data, "-w"]
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        subprocess.run(
            [*control, "-l", str(folder / "log"), "-o", options, "start"],
            check=True,
            **common,
        )
        stack.callback(
            subprocess.run, [*control, "-m", "immediate", "stop"], check=True, **common
        )
        yield f"postgresql://reader@/postgres?host={folder}"


def test_asyncpg_program_runs(run, postgres):
    async def fill():
        connection = await asyncpg.connect(postgres)
        await connection.execute(
            "CREATE TABLE readings (id int PRIMARY KEY, value float8)"
        )
        await connection.copy_records_to_table(
            "readings", records=[(number, number / 2) for number in range(1000)]
        )
        await connection.close()

    asyncio.run(fill())
    printed = run(located(READINGS, "postgresql://reader@localhost/postgres", postgres))
    assert printed == ["1.5", "249750.0", "249750.0"]


def test_redis_program_runs(run, tmp_path):
    server = found("redis-server")
    if server is None:
        pytest.skip("needs Debian's redis-server")
    path = tmp_path / "socket"
    options = [
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--daemonize",
        "no",
        "--dir",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [server, *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if (
                    "Ready to accept connections" in line
                    or "ready to accept connections at" in line
                ):
                    break
            with redis.Redis(unix_socket_path=str(path)) as client:
                client.mset({f"image:{index}": bytes(index) for index in range(500)})
                client.rpush("queue", *range(25))
                printed = run(
                    located(
                        IMAGES,
                        'host="localhost", port=6379',
                        f"unix_socket_path={str(path)!r}",
                    )
                )
        finally:
            process.terminate()
    assert printed == [str(sum(range(500))), "25"]


@pytest.mark.parametrize("refusals", [0, 40])
def test_program_with_a_rate_limit_and_retries_reads_every_page_of_a_throttled_service(
    run, refusals
):
    asked, refused, tokens, at = 0, 0, 60, time.monotonic()

    async def page(request):
        nonlocal asked, refused, tokens, at
        index, now = request.match_info["index"], time.monotonic()
        asked += 1
        tokens, at = min(60, tokens + (now - at) * 300), now
        if tokens < 1 or asked <= refusals:
            refused += 1
            return web.Response(status=429, headers={"Retry-After": "1"})
        tokens -= 1
        return web.Response(text=index)

    quiet = "import logging\nlogging.disable()\n"  # stamina logs each retry
    with served("/{index}", page) as port:
        assert run(
            quiet + located(PAGES, "http://localhost:8080", f"http://127.0.0.1:{port}")
        ) == [str(sum(range(500)))]
    assert (refused, asked) == (refusals, 500 + refusals)


EXPECTED = """
import warnings
warnings.filterwarnings("ignore", "from_async_iterable.* has no state_dict")
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "a sample was skipped")
"""


def test_metrics_program_serves_the_numbers_of_the_loader(run):
    after = """
from urllib.request import urlopen
print(urlopen(f"http://localhost:{server.server_port}/metrics").read().decode())
server.shutdown()
server.server_close()
thread.join()
"""
    printed = " ".join(
        run(located(METRICS, "start_http_server(9400)", "start_http_server(0)") + after)
    )
    for line in re.findall(r"^(headrace_(?:batches|samples).*)$", text_of(WAITS), re.M):
        assert line in printed


def test_summary_of_a_report_is_that_of_the_page(run):
    *_, summary = run(REPORT + "print(loader.report().summary.replace(' ', '_'))")
    shape = r"waiting \d+ %, limit: [a-z-]+, try concurrency=\d+"
    assert re.fullmatch(shape, summary.replace("_", " "))
    assert re.search(rf"^train: 100%.* 100/100 .*it/s, {shape}\]$", text_of(WAITS), re.M)


def test_report_program_names_a_limit_of_the_page(run):
    printed = " ".join(run(REPORT))
    assert "Fetching is the limit: 16 in flight" in printed
    assert printed.index("Predicted wait after it") < printed.index("first batch after")
    named = re.findall(
        r'"([a-z-]+)"', " ".join(re.findall(r"^\| (\S*`\"[^|]*)\|", text_of(WAITS), re.M))
    )
    assert set(LIMITS) == set(named)


def test_trace_program_writes_its_file(run, tmp_path):
    assert run(located(TRACE, "epoch.json.gz", f"{tmp_path}/epoch.json.gz")) == []
    assert b"single fetch" in gzip.decompress((tmp_path / "epoch.json.gz").read_bytes())


def test_headspace_program_compares_steps_with_the_loader_and_without(run):
    assert "steps/s with the loader" in " ".join(run(located(HEADSPACE, "50", "8")))


@pytest.fixture
def photos(tmp_path):
    """The address of a folder of 50 classes, with a JPEG each."""
    for number in range(50):
        (tmp_path / f"{number}").mkdir()
        Image.new("RGB", (12, 10)).save(tmp_path / f"{number}/photo.jpg")
    return tmp_path.as_uri()


def numbers_in(printed):
    """The numbers in lines such as "rank 0, epoch 1: [2, 3]"."""
    return [int(number) for number in re.findall(r"\d+", re.sub("rank.*?:", "", printed))]


@pytest.fixture
def of_ranks(forks):
    """Run a program on two ranks; what each prints."""

    def run(program):
        ranks = Rendezvous(2)
        with contextlib.ExitStack() as stack:
            begun = [
                forks.start_source(program, RANK=f"{rank}", **ranks.variables)
                for rank in range(2)
            ]
            return [stack.enter_context(each).communicate()[0] for each in begun]

    return run


def test_programs_of_the_ranks_page_run_on_two_ranks(run, of_ranks, photos):
    on_mesh = located(TENSOR_PARALLEL, '"cuda", (4, 2)', '"cpu", (1, 2)')
    (ours, theirs), (same, again) = (
        map(numbers_in, of_ranks(located(program, "s3://bucket/train", photos)))
        for program in (RANKS, on_mesh)
    )
    assert (
        sorted(ours[:25] + theirs[:25])
        == sorted(ours[25:] + theirs[25:])
        == list(range(50))
    )
    assert same == again
    assert sorted(same) == list(range(50))
    assert numbers_in(" ".join(run(BY_COST))) == [2000]


def test_ranks_of_the_page_of_validation_evaluate_each_sample_once(of_ranks, photos):
    *_, evaluate = python_blocks("docs/train-and-validate.md")
    # 49 samples for two ranks.
    (Path(photos.removeprefix("file://")) / "7/photo.jpg").unlink()
    assert of_ranks(located(evaluate, "s3://bucket/val", photos)) == ["49 samples\n"] * 2


@pytest.mark.parametrize("program", [ENGINES, ON_DEVICE, FROM_TORCH])
def test_programs_on_photos_read_each_once(run, photos, program):
    fewer = [
        ("engines=4, num_workers=16", "engines=2, num_workers=2"),
        ("num_workers=8", "num_workers=1"),
    ]
    for written, here in [*fewer, ('device="cuda"', 'device="auto"')]:
        program = program.replace(written, here)
    assert sorted(
        numbers_in(" ".join(run(located(program, "s3://bucket/train", photos))))
    ) == list(range(50))


def test_function_for_on_error_leaves_out_the_sample_that_is_no_image(
    run, photos, tmp_path
):
    (tmp_path / "7/photo.jpg").write_bytes(b"no image")
    begin = "import io, headrace as hr\nfrom PIL import UnidentifiedImageError\nquarantine = io.StringIO()\n"
    end = f"""
photos = hr.ObjectDataset({photos!r}, labels="folder")
for images, labels in hr.DataLoader(photos, 50, transform=hr.decode.image(size=8), on_error=on_error):
    print(len(labels), quarantine.getvalue())
"""
    assert run(EXPECTED + begin + ON_ERROR + end) == ["49", "7/photo.jpg"]


def test_functions_of_the_page_of_options_draw_the_same_in_a_second_loader(run):
    begin = """
import random, types, torch, headrace as hr
images = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
class Augmenter:
    def reset_rng(self, seed):
        self.rng = random.Random(seed)
    def __call__(self, sample):
        return sample[0, 0] + self.rng.random()
some_library = types.SimpleNamespace(Augmenter=Augmenter)
"""
    seeded = located(
        RANDOMIZED.splitlines()[-1], "transform=augment", "transform=Augment()"
    )
    programs = [
        RANDOMIZED + "print(sum(loader).mean())\n",
        f"{seeded}\nprint(sum(loader).mean())\n",
    ]
    first, again, other, same = run(begin + 2 * programs[0] + SEEDED + 2 * programs[1])
    assert (first, other) == (again, same)
    assert first != other


def test_programs_that_replace_those_of_other_loaders_read_their_data(
    run, photos, tmp_path
):
    folder = tmp_path.as_uri()
    for shard in range(2):
        with tarfile.open(tmp_path / f"train-000{shard}.tar", "w") as tar:
            for number in range(20 * shard, 20 * shard + 20):
                tar.add(tmp_path / "0/photo.jpg", f"{number}.jpg")
                (tmp_path / "label").write_text(f"{number}")
                tar.add(tmp_path / "label", f"{number}.cls")
    program = located(
        FROM_WEBDATASET,
        "s3://bucket/train-{0000..0127}",
        f"{folder}/train-{{0000..0001}}",
    )
    assert sorted(numbers_in(" ".join(run(program)))) == list(range(40))
    (tmp_path / "0.bin").write_bytes(bytes(2 * (256 * 16 + 1)))
    assert (
        run(located(FROM_LITDATA, "s3://bucket/tokens", folder))
        == ["torch.Size([8,", "256])"] * 2
    )
    mds = str(ROOT / "tests/fixtures/mds/raw")
    assert sorted(
        numbers_in(" ".join(run(located(FROM_MOSAIC, "s3://bucket/train", mds))))
    ) == list(range(18))
    assert run(FROM_TORCHDATA) == ["99"]


def test_program_with_a_format_of_its_own_reads_each_sample(run, tmp_path):
    for shard, count in enumerate((20, 0, 15)):
        table = np.cumsum([8 * (count + 2), *range(count)]).astype("<i8")
        records = b"".join(bytes([n]) * n for n in range(count))
        (tmp_path / f"{shard}.rec").write_bytes(
            count.to_bytes(8, "little") + table.tobytes() + records
        )
    assert run(located(RECORDS, "s3://bucket/records", str(tmp_path))) == ["35", "35"]


def test_programs_of_the_resuming_page_run(run, tmp_path):
    run(f"{EXPECTED}import os\nos.chdir({str(tmp_path)!r})\n" + "".join(RESUMING))


KILLED_AT = """
def print(line, *, write=print, **options):
    write(line, **options)
    if ", step {step}:" in line:
        os.kill(os.getpid(), {number})

"""


def test_killed_program_of_the_resuming_page_goes_on_with_the_losses_of_a_whole_run(
    run, tmp_path
):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    lines = []
    for number, step, status in (
        (signal.SIGKILL, 37, -signal.SIGKILL),
        (signal.SIGTERM, 81, 0),
    ):
        # The signal comes right after a step is printed: one from here could come between a
        # checkpoint and its line.
        signals = KILLED_AT.format(step=step, number=int(number))
        lines += run(f"import os\nos.chdir({str(killed)!r})\n{signals}{KILLED}", status)
    rest = run(f"import os\nos.chdir({str(killed)!r})\n{KILLED}")
    expected = run(f"import os\nos.chdir({str(whole)!r})\n{KILLED}")
    steps = dict(re.findall(r"step (\d+): (\S+)", " ".join(lines + rest)))
    assert steps == dict(re.findall(r"step (\d+): (\S+)", " ".join(expected)))
    assert len(steps) == 150
    assert len(rest) // 5 < 70  # the last run began after SIGTERM's checkpoint


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_point_to_existing_files_and_headings(document):
    folder = (ROOT / document).parent
    broken = []
    for link in links_of(text_of(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = folder / path if path else ROOT / document
        if not target.exists() or (
            anchor and anchor not in headings_of(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


def test_pages_and_headings_that_the_sources_name_exist():
    missing = []
    for path in ROOT.glob("src/**/*.py"):
        for page, anchor in re.findall(
            r"(?<![/\w])(docs/[\w/.-]*\w)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            # A design note may be named by its number.
            found = next(ROOT.glob(f"{page}*"), None)
            if found is None or (
                anchor and anchor not in headings_of(found.read_text(encoding="utf-8"))
            ):
                missing.append(f"{path.name}: {page}#{anchor}")
    assert missing == []


def test_page_of_benchmarks_has_the_tables_that_the_program_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sizing = importlib.import_module("sizing")
    tables = [sizing.cost_table(), *sizing.host_tables()]
    assert [
        table
        for table in tables
        if f"\n\n{table}\n\n" not in text_of("docs/benchmarks.md")
    ] == []


def test_tests_named_in_documents_exist():
    defined = [
        name
        for path in ROOT.glob("tests/**/*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    ]
    named = {
        name
        for document in DOCUMENTS
        # docs/coming-from.md names tests of torchdata
        if "docs" in document and document != "docs/coming-from.md"
        for name in re.findall(r"`(test_\w+?_?…?)`", text_of(document))
    }
    assert named
    assert [
        name
        for name in sorted(named)
        if not (
            any(each.startswith(name[:-1]) for each in defined)
            if name.endswith("…")
            else name in defined
        )
    ] == []


def test_promises_name_tests_that_exist():
    promises = re.search(
        r"^## Promises$.*?^## ", text_of("CONTRIBUTING.md"), re.M | re.S
    )[0]
    rows = re.findall(r"^\| .* \|$", promises, re.M)[1:]
    missing = []
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)`(?:: ((?:`test_\w+`(?:, )?)+))?", row)
        assert named, row
        for path, tests in named:
            exists = (ROOT / path).exists()
            source = text_of(path) if path.endswith(".py") and exists else ""
            names = re.findall(r"`(\w+)`", tests)
            missing += [name for name in names if f"def {name}(" not in source]
            missing += [] if exists else [path]
    assert missing == []


def test_links_on_pypi_are_absolute():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = README
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    pictures = re.findall(r'\b(?:src|srcset)="([^"]+)"', text)
    assert [
        link for link in links_of(text) + pictures if not link.startswith("https://")
    ] == []
    address = PROJECT["project"]["urls"]["Repository"]
    assert f"]({address}/blob/main/docs/recipes.md)" in text
    assert all(url.startswith(address) for url in PROJECT["project"]["urls"].values())
