"""`headrace verify`: from files of saved states."""

import torch

import headrace as hr
from headrace.cli.main import main
from tests.unit.datasets.test_tar import numbered

JOB = """
import headrace as hr

def loader():
    return hr.DataLoader(hr.TarDataset.index("shards"), 4, shuffle=True, seed=0, collate_fn=list)
"""


def test_samples_delivered_twice_are_named_by_shard(tmp_path, capsys, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "shards").mkdir()
    for name, data in numbered(2, 10).items():
        (tmp_path / "shards" / name).write_bytes(data)
    dataset = hr.TarDataset.index(tmp_path / "shards", save=True)
    loader = hr.DataLoader(dataset, 4, shuffle=True, seed=0, collate_fn=list)
    batches = []
    for number, batch in enumerate(loader):
        batches.append([sample["__key__"] for sample in batch])
        state = loader.state_dict()
        saved = {"loader": state, "model": {"weight": torch.ones(1)}} if number % 2 else state
        torch.save(saved, tmp_path / f"{number}.pt")
    indices = {sample["__key__"]: index for index, sample in enumerate(dataset)}

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # is undone, as what the command adds

    def verified(*states):
        status = main(["verify", "--loader", "job:loader", *states])
        said = capsys.readouterr()
        assert said.err == ""
        return status, said.out.splitlines()

    whole = "epoch 0: 20 once, 0 repeated, 0 never, 0 excluded"
    assert verified("-", "1.pt", "1.pt", "4.pt") == (0, [whole])
    status, (_, *twice) = verified("-", "1.pt", "0.pt", "4.pt")
    found = sorted(indices[key] for key in batches[1])
    lines = [f"  repeated: {index} {dataset.sample_key(index)}" for index in found]
    assert (status, twice) == (1, lines)
    assert "0000.tar[" in "".join(twice)
    status, (running,) = verified("-", "2.pt")
    assert (status, running[:35]) == (0, "epoch 0, not ended: 12 once, 0 repe")

    command = ["verify", "--loader", "torch:ones", str(tmp_path / "0.pt")]
    assert main(command) == 2
    assert "two states for each part" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "job.py")]) == 2
    assert "job.py has no state that torch.save wrote" in capsys.readouterr().err
