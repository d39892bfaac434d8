"""TLS that cannot work is a fault before the start, towards engines and towards clients."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gateway.config.load import load_config
from tests.certificates import Authority
from tests.config.faults import faults

BACKEND = "open_access: true\npools: [{{name: p, backends: [{{url: '{url}', tls: {{{tls}}}}}]}}]\n"
TLS_FAULTS = [
    ("https://h", "ca_file: /nowhere/ca.pem", "the authorities in /nowhere/ca.pem cannot be read: No such file"),
    ("https://h", "ca_file: '{here}/junk.pem'", "junk.pem cannot be read: it is no PEM file of that kind"),
    ("https://h", "cert_file: '{here}/junk.pem'", "junk.pem cannot be used: it is no PEM file of that kind"),
    ("https://h", "cert_file: '{here}/one.pem', key_file: '{here}/two.key'", "key values mismatch"),
    ("https://h", "cert_file: '{here}/one.pem', key_file: '{here}/locked.key'", "readable without a password"),
    ("https://h", "key_file: '{here}/one.key'", "has a key_file and no cert_file"),
    ("https://h", "verify: false, ca_file: '{here}/ca.pem'", "is without effect where verify is false"),
    ("http://h", "ca_file: '{here}/ca.pem'", "is for an https url"),
    ("sim:", "verify: false", "is for an https url"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("certificates")
    authority = Authority(here)
    for name in ("one", "two"):
        authority.sign(name)
    locked = ["openssl", "ec", "-in", "one.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"]
    subprocess.run(locked, cwd=here, check=True, capture_output=True)
    (here / "junk.pem").write_text("junk")
    return here


@pytest.mark.parametrize(("url", "tls", "said"), TLS_FAULTS)
def test_tls_that_cannot_work_is_said_before_the_start(
    tmp_path: Path, certificates: Path, url: str, tls: str, said: str
) -> None:
    [found] = faults(tmp_path, BACKEND.format(url=url, tls=tls.format(here=certificates)))
    assert "pools[0].backends[0].tls" in found
    assert said in found


LISTENER_TLS = "open_access: true\npools: [{{name: p, backends: [{{url: 'sim:'}}]}}]\ntls: {{{tls}}}\n"
LISTENER_FAULTS = {
    "cert_file: /nowhere/tls.crt": "tls: the certificate /nowhere/tls.crt cannot be read: No such file",
    "cert_file: '{here}/one.pem', key_file: /nowhere/tls.key": "tls: the key /nowhere/tls.key cannot be read: No such",
    "cert_file: '{here}', key_file: '{here}/one.key'": "cannot be read: Is a directory",
    "cert_file: '{here}/one.pem', key_file: '{here}/two.key'": "they do not belong together (key values mismatch)",
    "cert_file: '{here}/one.pem', key_file: '{here}/locked.key'": "readable without a password",
    "cert_file: '{here}/junk.pem'": "junk.pem cannot be used: it is no PEM file of that kind",
    "cert_file: '{here}/one.pem', key_file: '{here}/one.key', client_ca_file: /nowhere": "the authorities in /nowhere",
    "key_file: '{here}/one.key'": "tls.cert_file: is missing",
}


@pytest.mark.parametrize("tls", LISTENER_FAULTS)
def test_a_certificate_that_cannot_be_shown_is_said_before_the_start(
    tmp_path: Path, certificates: Path, tls: str
) -> None:
    [found] = faults(tmp_path, LISTENER_TLS.format(tls=tls.format(here=certificates)))
    assert found.startswith(":3:")
    assert LISTENER_FAULTS[tls] in found


def test_tls_that_works_is_no_fault(tmp_path: Path, certificates: Path) -> None:
    tls = f"ca_file: {certificates}/ca.pem, cert_file: {certificates}/one.pem, key_file: {certificates}/one.key"
    (tmp_path / "c.yaml").write_text(BACKEND.format(url="https://h", tls=tls))
    assert load_config(tmp_path / "c.yaml").pools[0].backends[0].tls is not None
