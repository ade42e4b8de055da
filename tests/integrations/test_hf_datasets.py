"""Hugging Face's `datasets` in headrace's loader, beside torch's."""

import functools

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

pytest.importorskip("datasets")

import datasets
from datasets.distributed import split_dataset_by_node

import headrace as hr
from tests.documents import programs_with_output
from tests.integrations.common import plain

IMPORTS = ("datasets",)
MAP, STREAM = "HF datasets, map-style", "HF IterableDataset"
SAMPLES = 42
BATCH = 4


def rows():
    return datasets.Dataset.from_dict(
        {"x": list(range(SAMPLES)), "name": [str(number) for number in range(SAMPLES)]}
    )


def squared(batch):
    return {"y": [number * number for number in batch["x"]], "name": batch["name"]}


MAPS = {
    "plain": rows,
    "torch format": lambda: rows().with_format("torch"),
    "set_transform": lambda: rows().with_transform(squared),
}
STREAMS = {
    "of a table": lambda: rows().to_iterable_dataset(num_shards=4),
    "of a generator": lambda: datasets.IterableDataset.from_generator(
        generated, gen_kwargs={"shards": [0, 1, 2, 3]}
    ),
    "shuffled shards": lambda: (
        rows().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=1)
    ),
}


def generated(shards):
    for shard in shards:
        for number in range(10):
            yield {"x": 10 * shard + number}


def numbers(batches):
    return [number for batch in batches for number in batch["x"].tolist()]


@pytest.mark.proves(MAP, "same samples as in torch's loader", "with workers")
@pytest.mark.parametrize(
    ("name", "workers"), [("torch format", 2), *((name, 0) for name in MAPS)]
)
def test_map_style_dataset_gives_the_batches_of_torchs_loader(name, workers):
    with hr.DataLoader(MAPS[name](), BATCH, num_workers=workers) as loader:
        assert plain(list(loader)) == plain(list(TorchDataLoader(MAPS[name](), BATCH)))


@pytest.mark.proves(STREAM, "same samples as in torch's loader", "with workers")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_stream_gives_the_batches_of_torchs_loader_in_each_epoch(name, workers):
    with hr.DataLoader(STREAMS[name](), BATCH, num_workers=workers) as loader:
        torchs = TorchDataLoader(STREAMS[name](), BATCH, num_workers=workers)
        for epoch in range(2 - workers // 2):
            loader.set_epoch(epoch)
            torchs.dataset.set_epoch(epoch)
            assert plain(list(loader)) == plain(list(torchs))


def check_continued(made, count):
    with made() as loader, made() as again:
        loader.set_epoch(1)
        batches = iter(loader)
        begun = [next(batches) for _ in range(3)]
        again.load_state_dict(loader.state_dict())
        again.set_epoch(1)
        rest = numbers(again)
        assert rest == numbers(batches)
    assert len(set(numbers(begun) + rest)) == len(numbers(begun) + rest) == count


@pytest.mark.proves(MAP, "exact resume in mid-epoch")
def test_map_style_dataset_is_continued():
    check_continued(
        lambda: hr.DataLoader(MAPS["torch format"](), BATCH, shuffle=True, seed=0),
        SAMPLES,
    )


@pytest.mark.proves(STREAM, "exact resume in mid-epoch")
@pytest.mark.parametrize(
    (
        "name",
        "workers",
    ),  # with workers, datasets 5.2 raises an IndexError for the state of shuffled shards
    [
        ("shuffled shards", 0),
        ("of a table", 2),
        ("of a generator", 0),
        ("of a generator", 2),
    ],
)
def test_stream_is_continued_in_its_second_epoch(name, workers):
    made = functools.partial(hr.DataLoader, batch_size=BATCH, num_workers=workers)
    check_continued(lambda: made(STREAMS[name]()), 40 if "generator" in name else SAMPLES)


def test_recipe_prints_what_is_written_below_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    columns = {"id": range(400), "label": [1] * 400, "features": [[0.5, 1.5]] * 400}
    datasets.Dataset.from_dict(columns).to_parquet("table/0.parquet")
    recipes = programs_with_output("docs/recipes.md")
    ((program, printed),) = [recipe for recipe in recipes if "from datasets" in recipe[0]]
    exec(program, {})
    assert capsys.readouterr().out == printed


@pytest.mark.proves(MAP, "each sample once, on two ranks")
@pytest.mark.proves(STREAM, "each sample once, on two ranks")
def test_two_ranks_share_each_epoch(launcher):
    reports = launcher.run(of_rank, ranks=2)
    for name in reports[0]:
        assert sorted(reports[0][name] + reports[1][name]) == list(range(SAMPLES)), name
        assert len(reports[0][name]) in (20, 21, 22)


def of_rank():
    """This rank's samples, by kind of dataset."""
    rank = hr.get_rank_info().rank
    dataset = MAPS["torch format"]()
    loaders = {
        "map-style": hr.DataLoader(
            dataset, BATCH, sampler=hr.ElasticSampler(dataset, seed=0)
        )
    }
    for workers in (0, 2):
        stream = split_dataset_by_node(STREAMS["shuffled shards"](), rank, 2)
        loaders[f"stream, {workers} workers"] = hr.DataLoader(
            stream, BATCH, num_workers=workers
        )
    return {name: numbers(loader) for name, loader in loaders.items()}
