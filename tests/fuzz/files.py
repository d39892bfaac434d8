"""The readers of files and tables: the config, traces and access logs, the entries of keys."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from gateway.config.load import FILE_BYTES_MAX, ConfigError, Fault, load_config
from gateway.keys.issued import entry, read_entry
from simulation.traces.lines import LINE_BYTES_MAX, TraceError
from simulation.traces.reader import Trace
from tests.fuzz.harness import Harness

_DIRECTORY: list[tempfile.TemporaryDirectory[str]] = []
BLOCK_TOKENS = 65536
HASH = b"sha256:" + b"0" * 64


def _file(data: bytes) -> Path:
    """A file with this in it, always the same one."""
    if not _DIRECTORY:
        _DIRECTORY.append(tempfile.TemporaryDirectory(prefix="fairgate-fuzz-"))
    path = Path(_DIRECTORY[0].name, "file")
    path.write_bytes(data)
    return path


def read_config(data: bytes) -> None:
    """It is a config, or every fault has a place in the file."""
    faults: list[Fault] = []
    try:
        config = load_config(_file(data))
    except ConfigError as error:
        faults = error.faults
    lines = data.count(b"\n") + data.count(b"\r") + data.count(b"\xc2\x85") + data.count(b"\xe2\x80") + 2
    assert all(0 <= fault.line <= lines and fault.message for fault in faults)
    if faults:
        return
    assert config.pools
    assert all(math.isfinite(tenant.weight) and tenant.weight > 0 for tenant in config.tenants)


def read_trace(data: bytes) -> None:
    """It can be replayed, or what is wrong is said."""
    trace = Trace(_file(data), limit=1000)
    last_s = 0.0
    for arrival in trace.arrivals(BLOCK_TOKENS):
        assert math.isfinite(arrival.arrived_s)
        assert arrival.arrived_s >= last_s
        assert arrival.prompt_tokens > 0
        assert 0 <= arrival.output_tokens <= arrival.output_tokens_max
        assert 0 < arrival.weight <= 1000
        last_s = arrival.arrived_s


def read_key(data: bytes) -> None:
    """An entry of the table of keys: what is read of it is read again of what is written of that."""
    tenant, key = read_entry(HASH, data)
    assert bool(tenant) == bool(data)
    if tenant:
        assert key.weight is None or 0 < key.weight < math.inf
        assert read_entry(HASH, entry(tenant, key).encode()) == (tenant, key)


_YAML = (
    b"\n", b"  ", b"- ", b": ", b"&a ", b"*a", b"[", b"]", b"{", b"}", b"|\n", b">\n", b'"', b"'", b"#", b"!!int ",
    b"${HOME}", b"${X:-1}", b"$${", b"---\n", b"? ", b"%YAML 1.1\n", b"\t", b"\0", b"\xff", b"9" * 40, b"1e999",
    b".nan", b"-1", b"0", b"true", b"null", b"pools:", b"tenants:", b"backends:", b"url: http://a:1\n", b"name: x\n",
    b"policy:", b"<<: ",
)  # fmt: skip
_TRACE = (
    b'"tokens_cached":', b'"tokens_in":', b'"ts":', b'"total_ms":', b"\n{", b"}\n", b"1e12", b"9" * 40, b"-1", b"NaN",
    b"null", b"true", b'"', b",", b"[" * 40, b"inf", b"\xff", b"\xef\xbb\xbf", b"\x1f\x8b", b"t_s,", b"1e308", b"\r",
    b"\0",
)  # fmt: skip
_KEY = (
    b"{", b"}", b'"tenant":"a"', b'"expires":"2027-01-31"', b'"apps":["a"]', b'"models":["m"]', b'"weight":', b" ",
    b"- ", b"2027-01-31", b"9999-12-31T23:59:59-14:00", b"1e308", b"-1", b"1e999", b"null", b"true", b"\xff", b"[" * 40,
)  # fmt: skip

HARNESSES = (
    # PyYAML makes several objects of each character of a flow, in Python.
    Harness(
        "config", read_config, (), _YAML, 60.0, 1000.0, grown_bytes=1 << 16, start_bytes=FILE_BYTES_MAX + (1 << 20)
    ),
    Harness("trace", read_trace, (TraceError,), _TRACE, 5.0, 40.0, start_bytes=LINE_BYTES_MAX + (1 << 20)),
    Harness("key", read_key, (ValueError,), _KEY, 5.0, memory_ratio_max=40.0, start_bytes=1 << 22),
)
