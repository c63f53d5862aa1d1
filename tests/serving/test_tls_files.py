"""Files of TLS flags: a wrong one is refused before the weights are loaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.tls_files import check_tls_files


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, the same key encrypted, and another key."""
    folder = tmp_path_factory.mktemp("keys")
    make = ["openssl", "req", "-x509", "-subj", "/CN=localhost", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    for name in ("own", "other"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run([*make, "-nodes", *files], cwd=folder, check=True, capture_output=True)
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", "own.key", "-out", "encrypted.key"]
    subprocess.run(encrypt, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")
def test_certificates(keys: Path) -> None:
    """Uvicorn loads them after the weights, and asks a terminal for a password."""

    def check(
        key: str, password: str | None = None, certificate: str = "own.pem", authorities: str = "own.pem"
    ) -> None:
        check_tls_files(str(keys / certificate), str(keys / key), str(keys / authorities), password)

    check_tls_files(None, None, None, None)
    check("own.key")
    check("encrypted.key", "word")
    wrong: list[dict[str, Any]] = [
        {"key": "other.key"},
        {"key": "encrypted.key"},
        {"key": "encrypted.key", "password": "other"},
        {"key": "own.key", "certificate": "own.key"},
        {"key": "own.key", "authorities": "own.key"},
        {"key": "absent"},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=f"--ssl-certfile {keys}.*expected a certificate and its key"):
            check(**arguments)
