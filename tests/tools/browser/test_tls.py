"""A pinned address must not weaken TLS: the certificate is still checked against the name that was asked for."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.tools.servers import running
from vllm_gptoss.tools.browser.guard import Guard, GuardedTransport


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for `name`, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    unencrypted = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted)
    (folder / "key.pem").write_bytes(pem)
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.mark.parametrize(("asked", "passes"), [("site.example", True), ("other.example", False)])
async def test_the_certificate_is_checked_against_the_name(tmp_path: Path, asked: str, passes: bool) -> None:
    cert, key = certificate(tmp_path, "site.example")
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(request.headers["host"]))])
    async with running(app, ssl_certfile=cert, ssl_keyfile=key) as url:
        port = url.rsplit(":", 1)[1]
        guard = Guard([f"{asked}:{port}"], to_loopback)
        inner = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=cert), trust_env=False)
        async with httpx.AsyncClient(transport=GuardedTransport(guard, inner)) as client:
            if passes:
                assert (await client.get(f"https://{asked}:{port}/")).text == f"{asked}:{port}"
            else:
                with pytest.raises(httpx.ConnectError, match="[Hh]ostname mismatch"):
                    await client.get(f"https://{asked}:{port}/")
