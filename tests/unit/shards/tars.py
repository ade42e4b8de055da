"""Shards for tests."""

import gzip
import io
import tarfile


def shard(samples, **fields):
    """The bytes of a tar with these keys; each field is a function of the key, and by default there is one."""
    fields = fields or {"txt": lambda key: f"text of {key}".encode()}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for key in samples:
            for field, make in fields.items():
                data = make(key)
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def members(*files):
    """The bytes of a tar with these ``(name, content)``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def zstd(data):
    """`data`, packed with a checksum."""
    try:
        from compression import zstd as module
    except ImportError:
        from backports import zstd as module
    return module.compress(data, options={module.CompressionParameter.checksum_flag: 1})


PACKERS = {"tar": bytes, "tar.gz": gzip.compress, "tgz": gzip.compress, "tar.zst": zstd}
