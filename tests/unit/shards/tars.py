"""Shards for tests."""

import gzip
import io
import tarfile

import pyarrow.parquet


def shard(samples, **fields):
    """The bytes of a tar with these keys; each field is a function of the key, and by default there is one."""
    fields = fields or {"txt": lambda key: f"text of {key}".encode()}
    return members(
        *(
            (f"{key}.{field}", make(key))
            for key in samples
            for field, make in fields.items()
        )
    )


def members(*files, format=tarfile.DEFAULT_FORMAT, **extra):
    """The bytes of a tar with these ``(name, content)``; bytes are those of a file, a `TarInfo` is put in as it is."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format, **extra) as tar:
        for name, content in files:
            info = tarfile.TarInfo() if isinstance(content, bytes) else content
            info.name = name
            if info is not content:
                info.size = len(content)
            tar.addfile(info, None if info is content else io.BytesIO(content))
    return stream.getvalue()


def parquet(table, **options):
    """The bytes of a Parquet file with a table."""
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, **options)
    return stream.getvalue()


def zstd(data):
    """`data`, packed with a checksum."""
    try:
        from compression import zstd as module
    except ImportError:
        from backports import zstd as module
    return module.compress(data, options={module.CompressionParameter.checksum_flag: 1})


PACKERS = {"tar": bytes, "tar.gz": gzip.compress, "tgz": gzip.compress, "tar.zst": zstd}
