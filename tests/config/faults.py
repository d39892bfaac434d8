"""What tests say of a file's faults: a good file, and all faults of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.load import ConfigError, load_config

GOOD = "open_access: true\npools: [{name: p, backends: [{url: 'sim:'}]}]\n"


def faults(tmp_path: Path, text: str | bytes) -> list[str]:
    """All faults of a file, without its name."""
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == "\n".join(map(str, caught.value.faults))
    assert all(fault.file == str(file) for fault in caught.value.faults)
    return [str(fault).removeprefix(str(file)) for fault in caught.value.faults]
