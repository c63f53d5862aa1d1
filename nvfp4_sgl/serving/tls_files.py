"""The files of ``--ssl-*`` flags, which uvicorn loads only when the weights are loaded."""

from __future__ import annotations

import ssl

from nvfp4_sgl.errors import ConfigError


def check_tls_files(certificate: str | None, key: str | None, authorities: str | None, password: str | None) -> None:
    """Load the files before the weights, as uvicorn does later, but ask no terminal for a password.

    Args:
        certificate: path of ``--ssl-certfile``; ``None`` without TLS.
        key: path of ``--ssl-keyfile``.
        authorities: path of ``--ssl-ca-certs``.
        password: of an encrypted key, ``--ssl-keyfile-password``.

    Raises:
        ConfigError: OpenSSL cannot read a file, or the key is another certificate's.
    """
    if certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, lambda: password or "")
        if authorities is not None:
            context.load_verify_locations(authorities)
    except OSError as error:  # OpenSSL's, too
        flags = {"certfile": certificate, "keyfile": key, "ca-certs": authorities}
        files = " ".join(f"--ssl-{name} {path}" for name, path in flags.items() if path is not None)
        raise ConfigError(
            f"{files}: expected a certificate and its key in PEM form, found {error}; correct the paths, or the"
            " password of the key (--ssl-keyfile-password)"
        ) from error
