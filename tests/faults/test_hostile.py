"""Input that somebody made to do harm: nothing of it runs, grows without bound, leads elsewhere or tells secrets."""

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np
import pytest

from headrace.testing import ObjectServer

CLOSING = 5.0  # seconds; obstore closes idle connections on threads of its own, some time after their store is gone
HUGE = 256 << 20  # bytes of zeros; gzip makes 260 KB of them
MOST = 64 << 20  # bytes that unpacking it may take in all: one piece is 4 MiB, and there are a few


class Harm:
    """What leaves a mark where somebody unpickles it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def archive(*files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, size in files:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    return stream.getvalue()


# Pickles


def test_an_npy_of_pickled_objects_is_refused_and_not_run(case, tmp_path):
    mark = tmp_path / "harm"
    array = np.empty(1, dtype=object)
    array[0] = Harm(str(mark))
    np.save(stream := io.BytesIO(), array, allow_pickle=True)
    with ObjectServer({"0.npy": stream.getvalue()}) as server:
        case(
            """
            try:
                hr.TokenDataset(f"{url}/0.npy", seq_len=1)
            except hr.ShardError as error:
                assert "no row of tokens" in str(error), str(error)
            else:
                raise AssertionError("it was taken")
            """,
            within=CLOSING,
            url=server.http_url,
        )
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harm(str(mark)))).close()
    assert mark.exists(), "what would have been, had it been run"


def test_an_index_with_pickled_objects_is_made_anew_and_not_run(case, tmp_path):
    mark = tmp_path / "harm"
    array = np.empty(1, dtype=object)
    array[0] = Harm(str(mark))
    names = ("version", "size", "etag", "fields", "keys", "offsets", "sizes", "checksums")
    np.savez(stream := io.BytesIO(), **dict.fromkeys(names, array))
    with ObjectServer({"0.tar": archive(("a.txt", 3)), "0.tar.index.npz": stream.getvalue()}) as server:
        case(
            """
            dataset = hr.TarDataset.index(f"{url}/0.tar", store=hr.Store(url, options=options), cache_folder=False)
            assert dataset[0]["txt"] == bytes(3)
            """,
            within=CLOSING,
            url=server.url,
            options=server.store_options,
        )
    assert not mark.exists()


# Bombs: what is held in memory does not depend on what they unpack to

MEASURED = """
import tracemalloc

def peak(dataset):
    tracemalloc.start()
    try:
        with hr.DataLoader(dataset, batch_size=1, collate_fn=len) as loader:
            delivered, errors = 0, []
            batches = iter(loader)
            while True:
                try:
                    delivered += next(batches)
                except StopIteration:
                    return delivered, errors, tracemalloc.get_traced_memory()[1]
                except hr.ShardError as error:
                    errors.append(error)
    finally:
        tracemalloc.stop()
"""


@pytest.fixture
def measured(case):
    def run(objects, body):
        with ObjectServer(objects) as server:
            case(MEASURED + body, within=CLOSING, url=server.http_url, most=MOST)

    return run


def test_a_line_that_unpacks_without_end_is_refused_at_its_limit(measured):
    measured(
        {"0.txt.gz": gzip.compress(bytes(HUGE))},
        """
delivered, (error,), peak = peak(hr.LinesDataset(f"{url}/0.txt.gz", line_limit=1 << 20))
assert "line_limit" in str(error) and not delivered and peak < most, (str(error), peak)
""",
    )


def test_a_member_that_unpacks_beyond_its_limit_is_refused_before_it_does(measured):
    measured(
        {"0.tar.gz": gzip.compress(archive(("a.txt", 3), ("b.txt", HUGE)))},
        """
delivered, (error,), peak = peak(hr.TarDataset(f"{url}/0.tar.gz", member_limit=1 << 20))
assert "member_limit" in str(error) and error.member == "b.txt" and peak < most, (str(error), peak)
""",
    )


def test_a_member_that_nobody_wants_is_passed_over_without_being_held(measured):
    measured(
        {"0.tar.gz": gzip.compress(archive(("a.txt", 3), ("a.bin", HUGE), ("b.txt", 3)))},
        """
delivered, errors, peak = peak(hr.TarDataset(f"{url}/0.tar.gz", fields=["txt"]))
assert delivered == 2 and not errors and peak < most, (delivered, errors, peak)
""",
    )


def test_nested_json_is_an_error_of_its_shard(measured):
    measured(
        {"0.jsonl": b"1\n" + b"[" * 1_000_000 + b"\n"},
        """
delivered, (error,), peak = peak(hr.LinesDataset(f"{url}/0.jsonl"))
assert delivered == 1 and error.offset == 2 and error.shard.endswith("0.jsonl"), error
""",
    )


def test_a_header_that_claims_what_is_not_there_costs_no_memory(measured):
    claimed = bytearray(archive(("a.txt", 3)))
    claimed[124:136] = b"%011o\0" % (900 << 20)  # below the limit of a member, and the shard ends behind it
    claimed[148:156] = b" " * 8
    claimed[148:156] = b"%06o\0 " % sum(claimed[:512])
    measured(
        {"0.tar": bytes(claimed)},
        """
delivered, (error,), peak = peak(hr.TarDataset(f"{url}/0.tar"))
assert type(error) is hr.TruncatedShardError and peak < most, (error, peak)
""",
    )


def test_an_array_that_claims_what_is_not_there_is_refused(case):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": False, "shape": (1 << 60,)})
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b"{" * 100
    with ObjectServer({"0.npy": stream.getvalue() + bytes(8), "1.npy": long}) as server:
        case(
            """
            for number in range(2):
                try:
                    hr.TokenDataset(f"{url}/{number}.npy", seq_len=1)
                except hr.ShardError:
                    continue
                raise AssertionError("it was taken")
            """,
            within=CLOSING,
            url=server.http_url,
        )


# Keys


@pytest.mark.parametrize(
    "key", ["../secret", "a/../../secret", "%2e%2e/secret", "/etc/hostname", "..\\secret", "./../secret", "a\0b", ""]
)
def test_a_key_never_leads_out_of_its_place(case, tmp_path, key):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "train").mkdir()
    with ObjectServer({"secret": b"secret", "train/a": b"a"}) as server:
        case(
            """
            for url, options in places:
                dataset = hr.ObjectDataset(hr.Store(url, options=options), keys=["a", key])
                with hr.DataLoader(dataset, sampler=[1], batch_size=1, collate_fn=len) as loader:
                    delivered, (error,) = drain(loader)
                assert not delivered and f"index 1, key {key!r}" in told(error), told(error)
            """,
            within=CLOSING,
            key=key,
            places=[
                ((tmp_path / "train").as_uri(), {}),
                (f"{server.http_url}/train", {}),
                (f"{server.url}/train", server.store_options),
            ],
        )
        assert "secret" not in {seen.key for seen in server.seen()}


def test_a_key_of_300_characters_is_read_where_the_store_has_such_and_an_error_where_not(case, tmp_path):
    key = "k" * 300
    with ObjectServer({f"train/{key}": b"long"}) as server:
        case(
            """
            for url, options in ((http, {}), (s3, options)):
                assert bytes(hr.ObjectDataset(hr.Store(url, options=options), keys=[key])[0].data) == b"long"
            try:
                hr.ObjectDataset(folder, keys=[key])[0]
            except hr.StoreError as error:
                assert error.key == key
            else:
                raise AssertionError("no file may have that name")
            """,
            within=CLOSING,
            key=key,
            http=f"{server.http_url}/train",
            s3=f"{server.url}/train",
            options=server.store_options,
            folder=tmp_path.as_uri(),
        )


# Secrets


def test_a_canary_in_the_url_of_a_shard_is_seen_nowhere(case):
    objects = {"0.tar": b"damaged", "0.jsonl": b"{\n", "0.bin": b"odd", "good.tar": archive(("a.txt", 1))}
    with ObjectServer(objects) as server:
        said = case(
            """
            import io, logging, pickle, traceback
            log = io.StringIO()
            logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
            place = url.replace("http://", "http://canary-user:canary-password@")
            headers = {"client_options": {"default_headers": {"x-api-key": "canary-header"}}}
            shown = []
            for make in (hr.TarDataset, hr.LinesDataset):
                for name in ("0.tar", "0.jsonl", "gone.tar", "gone.jsonl"):
                    if name.endswith("tar") == (make is hr.TarDataset):
                        dataset = make(f"{place}/{name}", store=hr.Store(place, options=headers))
                        with hr.DataLoader(dataset, batch_size=1, on_error="skip", collate_fn=len) as loader:
                            error = None
                            try:
                                list(loader)
                            except hr.TooManySkippedError as refused:
                                error = refused.__cause__
                            (failure,) = loader.stats().skipped
                            shown += [repr(dataset), repr(loader), repr(loader.stats()), str(failure), repr(failure)]
                            shown.append(repr(dataset.shards))
                            if error is not None:
                                shown += [repr(vars(error)), repr(pickle.dumps(error))]
                                shown += traceback.format_exception(error)
            for name in ("0.bin", "gone.bin"):
                try:
                    hr.TokenDataset(f"{place}/{name}", seq_len=1, store=hr.Store(place, options=headers))
                except (hr.ShardError, hr.StoreError) as error:
                    shown += [str(error), repr(vars(error)), *traceback.format_exception(error)]
                else:
                    raise AssertionError("it was taken")
            (sample,) = hr.TarDataset(f"{place}/good.tar", store=hr.Store(place, options=headers))
            shown += [repr(sample), log.getvalue()]
            seen = [text for text in shown if "canary-" in text]
            assert not seen, seen[0]
            """,
            within=CLOSING,
            url=server.http_url,
        )
    assert "canary" not in said
