"""Malicious input: none of it is executed, grows without bound, leads out of its prefix or shows secrets."""

import contextlib
import gzip
import io
import itertools
import logging
import pickle
import struct
import traceback
import tracemalloc

import numpy as np
import pytest
import torch

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.watching import drain, text_of
from tests.programs import run_by
from tests.servers import store_of
from tests.unit.shards import tars

# seconds; obstore closes idle connections on threads of its own, some time after their store is
# gone
CLOSING = 5.0
HUGE = 128 << 20  # bytes of zeros; gzip makes 130 KB of them
PEAK_LIMIT = 48 << 20  # bytes that unpacking may allocate; one piece is 4 MiB


class Harm:
    """An object that makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def archive(*files):
    return tars.members(*((name, bytes(size)) for name, size in files))


# Pickles


def test_pickled_objects_in_npy_are_never_unpickled(case, tmp_path):
    mark = tmp_path / "harm"
    array = np.empty(1, dtype=object)
    array[0] = Harm(str(mark))
    np.save(tokens := io.BytesIO(), array, allow_pickle=True)
    with ObjectServer({"0.npy": tokens.getvalue()}) as server:
        url = server.http_url

        def program() -> None:
            with pytest.raises(hr.errors.ShardError, match="tokens are one-dimensional"):
                hr.TokenDataset(f"{url}/0.npy", seq_len=1)

        case(program, within=CLOSING)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harm(str(mark)))).close()
    assert mark.exists(), "the pickle works"


# Decompression bombs


def read(dataset):
    """Read a dataset; the number of its samples, the errors, and the peak of allocated bytes."""
    tracemalloc.start()
    try:
        with hr.DataLoader(
            dataset, batch_size=1, collate_fn=lambda samples: torch.zeros(1)
        ) as loader:
            delivered, errors = drain(loader)
            return delivered.total(), errors, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def claiming(size):
    """A tar whose only header claims `size` bytes."""
    claimed = bytearray(archive(("a.txt", 3)))
    claimed[124:136] = b"%011o\0" % size
    claimed[148:156] = b" " * 8
    claimed[148:156] = b"%06o\0 " % sum(claimed[:512])
    return bytes(claimed)


@pytest.fixture(scope="module")
def bombs():
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "<u2", "fortran_order": False, "shape": (1 << 60,)}
    )
    objects = {
        "0.npy": stream.getvalue() + bytes(8),  # a shape beyond its file
        "1.npy": b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b"{" * 100,
        "zeros.txt.gz": gzip.compress(bytes(HUGE), 1),
        "member.tar.gz": gzip.compress(archive(("a.txt", 3), ("b.txt", HUGE)), 1),
        "unused.tar.gz": gzip.compress(
            archive(("a.txt", 3), ("a.bin", HUGE), ("b.txt", 3)), 1
        ),
        "nested.jsonl": b"1\n" + b"[" * 1_000_000 + b"\n",
        "claims.tar": claiming(
            900 << 20
        ),  # less than the limit of a member, more than the shard has
    }
    with ObjectServer(objects) as server:
        yield server.http_url


@run_by("case", within=CLOSING)
def test_what_unpacks_or_claims_to_be_without_end_is_refused_at_its_limit(bombs):
    delivered, (error,), peak = read(
        hr.LinesDataset(f"{bombs}/zeros.txt.gz", line_limit=1 << 20)
    )
    assert "line_limit" in str(error), error
    assert not delivered
    assert peak < PEAK_LIMIT

    _, (error,), peak = read(
        hr.TarDataset(f"{bombs}/member.tar.gz", member_limit=1 << 20)
    )
    assert "member_limit" in str(error), error
    assert error.member == "b.txt", error
    assert peak < PEAK_LIMIT

    delivered, errors, peak = read(
        hr.TarDataset(f"{bombs}/unused.tar.gz", fields=["txt"])
    )
    assert (delivered, errors) == (
        2,
        [],
    )  # the member between them is skipped, and not held in memory
    assert peak < PEAK_LIMIT

    delivered, (error,), _ = read(hr.LinesDataset(f"{bombs}/nested.jsonl"))
    assert delivered == 1
    assert error.offset == 2, error
    assert error.shard.endswith("nested.jsonl"), error

    _, (error,), peak = read(hr.TarDataset(f"{bombs}/claims.tar"))
    assert type(error) is hr.errors.TruncatedShardError, error
    assert peak < PEAK_LIMIT

    for number in range(2):
        with pytest.raises(hr.errors.ShardError):
            hr.TokenDataset(f"{bombs}/{number}.npy", seq_len=1)


# Keys


KEYS = (
    "../secret",
    "a/../../secret",
    "%2e%2e/secret",
    "/etc/hostname",
    "..\\secret",
    "./../secret",
    "a\0b",
    "",
)


def test_key_never_leads_out_of_its_prefix(case, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "train").mkdir()
    with ObjectServer({"secret": b"secret", "train/a": b"a"}) as server:
        stores = [
            hr.Store(tmp_path / "train"),
            hr.Store(f"{server.http_url}/train"),
            store_of(server, "train"),
        ]

        def program() -> None:
            for store, key in itertools.product(stores, KEYS):
                if store is stores[0] and key.startswith("/"):
                    with pytest.raises(
                        ValueError, match="is not under the URL of store="
                    ):
                        hr.ObjectDataset(store, keys=["a", key])
                    continue
                dataset = hr.ObjectDataset(store, keys=["a", key])
                with hr.DataLoader(
                    dataset, sampler=[1], batch_size=1, collate_fn=len
                ) as loader:
                    delivered, (error,) = drain(loader)
                assert not delivered, text_of(error)
                given = f"index 1, key {key.lstrip('/')!r}"
                assert given in text_of(error), text_of(error)

        case(program, within=CLOSING)
        assert "secret" not in {seen.key for seen in server.seen()}


# Secrets


def shown_by(dataset):
    """What two epochs show in which one sample fails, whose error is raised, or skipped."""
    with hr.DataLoader(
        dataset, batch_size=1, collate_fn=lambda samples: torch.zeros(1)
    ) as loader:
        _, (error,) = drain(loader)
    with hr.DataLoader(dataset, batch_size=1, collate_fn=len, on_error="skip") as loader:
        with contextlib.suppress(hr.errors.TooManySkippedError):
            list(loader)
        (failure,) = loader.stats().skipped
        shown = [*map(repr, (dataset, loader, loader.stats(), failure)), str(failure)]
    if isinstance(dataset, hr.ObjectDataset):
        assert (error.__cause__, error.__context__) == (None, None)
    return [
        *shown,
        repr(vars(error)),
        repr(pickle.dumps(error)),
        *traceback.format_exception(error),
    ]


def test_secrets_in_urls_headers_and_credentials_are_shown_nowhere(case):
    objects = {
        "0.tar": b"damaged",
        "0.jsonl": b"{\n",
        "0.bin": b"odd",
        "good.tar": archive(("a.txt", 1)),
        "a": b"a",
    }
    with ObjectServer({**objects, "denied": b""}) as server:
        server.misbehave(
            Fault("status", key="denied", status=403, body="<Code>Denied</Code>")
        )
        url, s3, options = server.http_url, server.url, server.store_options

        def program() -> None:
            log = io.StringIO()
            logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
            secret = url.replace("http://", "http://canary-user:canary-password@")
            headers = {"default_headers": {"x-api-key": "canary-header"}}
            signed = {
                "access_key_id": "canary-id",
                "secret_access_key": "canary-secret",
                "token": "canary-token",
            }
            signed |= {
                "skip_signature": False,
                "client_options": {**options["client_options"], **headers},
            }
            plain = hr.Store(secret, options={"client_options": headers})
            queried = hr.Store(
                f"{secret}?sig=canary-query", options={"client_options": headers}
            )
            shown = []
            for store in (queried, hr.Store(s3, options={**options, **signed})):
                shown += [
                    repr(store),
                    *shown_by(hr.ObjectDataset(store, keys=["a", "denied"])),
                ]
            for make, name in ((hr.TarDataset, "tar"), (hr.LinesDataset, "jsonl")):
                for shard in ("0", "gone"):
                    dataset = make(f"{secret}/{shard}.{name}", store=plain)
                    shown += [repr(dataset.shards), *shown_by(dataset)]
            for name in ("0.bin", "gone.bin"):
                with pytest.raises((hr.errors.ShardError, hr.StoreError)) as caught:
                    hr.TokenDataset(f"{secret}/{name}", seq_len=1, store=plain)
                error = caught.value
                shown += [
                    str(error),
                    repr(vars(error)),
                    *traceback.format_exception(error),
                ]
            (sample,) = hr.TarDataset(f"{secret}/good.tar", store=plain)
            shown += [repr(sample), log.getvalue()]
            seen = [text for text in shown if "canary-" in text]
            assert not seen, seen[0]

        stderr = case(program, within=CLOSING)
    assert "canary" not in stderr
