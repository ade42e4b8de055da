"""The ledger of a store that misbehaves: what came and what was reported is what was planned, byte for byte."""

SAMPLES = 24
SIZE = 2_000


def contents():
    """The objects that the ledger knows: each sample's bytes follow from its key."""
    return {f"train/{i:04}": body_of(i) for i in range(SAMPLES)}


def body_of(number):
    return number.to_bytes(2, "little") * (SIZE // 2)


# What every case here begins with. The ledger counts what came and what was reported; a sample that came has the bytes
# that its key says it has.
LEDGER = '''
import re

QUICK = hr.RetryPolicy(initial_backoff=0.01)


def whole(sample):
    expected = int(sample.key).to_bytes(2, "little") * (SIZE // 2)
    assert bytes(sample.data) == expected, f"{sample.key} came with wrong bytes"
    return int(sample.key)


def objects(**more):
    return hr.ObjectDataset(hr.Store(url + "/train", options=options, **{"retry": QUICK, **more}))


def epoch(dataset, **more):
    """The delivered samples, and the errors by index."""
    told = {"batch_size": 1, "transform": whole, "placement": placement, **more}
    if placement == "process":
        told["num_workers"] = 1
    with hr.DataLoader(dataset, **told) as loader:
        delivered, errors = drain(loader)
    failures = {int(re.search(r", index (\\d+)", error.__notes__[-1])[1]): error for error in errors}
    assert len(failures) == len(errors), "a sample was reported twice"
    planned = collections.Counter(range(len(dataset)))
    assert delivered + collections.Counter(failures.keys()) == planned, "planned is not delivered + reported"
    return delivered, failures


def all_came(dataset, **more):
    delivered, failures = epoch(dataset, **more)
    assert not failures, failures
'''
