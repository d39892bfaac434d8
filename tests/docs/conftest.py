"""What stands for the files that examples of the documentation name."""

from __future__ import annotations

import pytest

from tests.certificates import Authority


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ours = Authority(tmp_path_factory.mktemp("tls"))
    cert, key = ours.sign("gateway")
    return {"/etc/fairgate/tls.crt": cert, "/etc/fairgate/tls.key": key, "/etc/fairgate/ca.pem": ours.ca}
