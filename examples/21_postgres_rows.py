"""
Rows of PostgreSQL
==================

Rows of PostgreSQL as a dataset: a cursor that reads ahead 100 rows at a time, never the whole
table.

It starts a server of its own in a temporary folder, and fills it. This page is not run when the
site is built, since it needs Debian's postgresql.

::

    apt-get install postgresql; pip install asyncpg; python examples/21_postgres_rows.py
"""

import asyncio
import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import asyncpg

import headrace as hr


def program(name):
    """Debian keeps the server's programs out of PATH."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or str(found[-1])


@contextlib.contextmanager
def postgres():
    """A server in a temporary folder, on a socket there and on no port."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        # The server refuses to run as root.
        user = "postgres" if os.geteuid() == 0 else None
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        subprocess.run(
            [program("initdb"), "-D", data, "-U", "reader", "--auth=trust", "--no-sync"],
            check=True,
            capture_output=True,
            user=user,
            cwd=folder,
        )
        control = [program("pg_ctl"), "-D", data, "-w", "-l", f"{folder}/log"]
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "user": user, "cwd": folder}
        subprocess.run([*control, "-o", options, "start"], **quiet)
        try:
            yield {"host": folder, "user": "reader", "database": "postgres"}
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


async def fill(server):
    connection = await asyncpg.connect(**server)
    try:
        await connection.execute(
            "CREATE TABLE readings (id int PRIMARY KEY, sensor text, value float8)"
        )
        rows = [(number, f"s{number % 4}", number / 2) for number in range(1000)]
        await connection.copy_records_to_table("readings", records=rows)
    finally:
        await connection.close()


def readings(server, sensor):
    """A stream with a connection per epoch, in a transaction, as cursors require."""

    async def rows():
        connection = await asyncpg.connect(**server)
        try:
            async with connection.transaction(readonly=True):
                query = "SELECT id, value FROM readings WHERE sensor = $1 ORDER BY id"
                async for row in connection.cursor(query, sensor, prefetch=100):
                    yield dict(row)
        finally:
            await connection.close()

    return hr.from_async_iterable(rows)


with postgres() as server:
    asyncio.run(fill(server))
    both = hr.mix(
        [readings(server, "s1"), readings(server, "s3")], weights=[2, 1], seed=7
    )
    with hr.DataLoader(both.take(200), batch_size=50) as loader:
        for batch in loader:
            shares = [(batch["id"] % 4 == number).sum().item() for number in (1, 3)]
            print(
                f"{len(batch['id'])} rows, {shares[0]} of s1 and {shares[1]} of s3, mean {batch['value'].mean():.1f}"
            )
    with hr.DataLoader(readings(server, "s0"), batch_size=100) as loader:
        total = sum(batch["value"].sum().item() for batch in loader)
    assert total == sum(number / 2 for number in range(0, 1000, 4))
    print(f"s0 adds up to {total}")
