"""TLS contexts for connections to engines and from clients, with errors that name the faulty file."""

from __future__ import annotations

import ssl


def client_context(
    *, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None, verify: bool = True
) -> ssl.SSLContext:
    """Return the context for an engine. ValueError names a faulty file and its fault.

    Args:
        ca_file: trusted authorities, in place of the system's.
        cert_file: shown to a server that asks for a client certificate, with the key in `key_file` or in this file.
        verify: False accepts any server certificate.
    """
    context = _context(ssl.Purpose.SERVER_AUTH, ca_file)
    if cert_file is not None:
        _load_certificate(context, cert_file, key_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def server_context(cert_file: str, *, key_file: str | None = None, client_ca_file: str | None = None) -> ssl.SSLContext:
    """Return the context for clients. ValueError names a faulty file and its fault.

    Args:
        client_ca_file: authorities of the certificates that clients must show.
    """
    context = _context(ssl.Purpose.CLIENT_AUTH, client_ca_file)
    _load_certificate(context, cert_file, key_file)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(purpose: ssl.Purpose, ca_file: str | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or later and HTTP/1.1."""
    try:
        context = ssl.create_default_context(purpose, cafile=ca_file)
    except OSError as error:
        raise ValueError(f"the authorities in {ca_file} cannot be read: {_text_of(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    for what, file in (("certificate", cert_file), ("key", key_file)):
        try:
            if file is not None:
                open(file, "rb").close()  # OpenSSL does not say which of the two it could not read
        except OSError as error:
            raise ValueError(f"the {what} {file} cannot be read: {_text_of(error)}") from None
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except OSError as error:
        files = cert_file if key_file is None else f"{cert_file} with the key {key_file}"
        raise ValueError(f"the certificate {files} cannot be used: {_text_of(error)}") from None


def what_failed(error: BaseException) -> str:
    """Return why a connection failed, with advice where the cause is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = (
            "name who signed it by tls.ca_file" if "match" not in error.verify_message else "the url needs its name"
        )
        return f"its certificate is not trusted: {error.verify_message}; {advice}"
    reason = _reason(error)
    if reason is not None:
        return f"TLS: {reason}"
    return str(error) or type(error).__name__


def _no_password() -> str:
    raise ValueError("the key is encrypted; it has to be readable without a password")


def _text_of(error: OSError) -> str:
    if _reason(error) == "key values mismatch":
        return "they do not belong together (key values mismatch)"
    if isinstance(error, ssl.SSLError):
        return f"it is no PEM file of that kind ({_reason(error) or error})"
    return error.strerror or str(error)


def _reason(error: BaseException) -> str | None:
    """Return OpenSSL's reason in words. Typeshed claims that a reason always exists; OpenSSL disagrees."""
    reason: object = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if isinstance(error, ssl.SSLError) and isinstance(reason, str) else None
