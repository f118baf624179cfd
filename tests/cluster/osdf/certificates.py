"""The test CA, the certificate of the servers, and the tokens of the protected namespace."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import secrets
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def make_certificates(folder: Path, host: str) -> None:
    """Writes ca.pem, server.pem (certificate + key) and token.key, valid for a week."""
    folder.mkdir(parents=True)
    ca_key, server_key, token_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name = _name("Trainyard test CA")
    ca = _certificate(ca_name, ca_name, ca_key.public_key(), ca_key, host=None)
    server = _certificate(_name(host), ca_name, server_key.public_key(), ca_key, host=host)
    (folder / "ca.pem").write_bytes(_pem(ca))
    _write_secret(folder / "server.pem", _pem(server) + _key_pem(server_key))
    _write_secret(folder / "token.key", _key_pem(token_key))


def make_token(folder: Path, issuer: str, scope: str, lifetime_s: float) -> str:
    """A token that says `scope` (such as 'storage.read:/protected') for that many seconds."""
    now_s = time.time()
    claims = {
        "iss": issuer,
        "sub": "tester",
        "aud": "https://wlcg.cern.ch/jwt/v1/any",
        "ver": "scitoken:2.0",
        "wlcg.ver": "1.0",
        "scope": scope,
        "jti": secrets.token_hex(8),
        "iat": int(now_s) - 5,
        "nbf": int(now_s) - 5,
        "exp": now_s + lifetime_s,
    }
    key = (folder / "token.key").read_bytes()
    return jwt.encode(claims, key, algorithm="ES256", headers={"kid": _key_id(key)})


class TokenCheck:
    """Whether a token opens a path: signed by our issuer, not expired, a scope that covers it."""

    def __init__(self, folder: Path) -> None:
        content = (folder / "token.key").read_bytes()
        key = serialization.load_pem_private_key(content, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key.public_key()
        self._key_id = _key_id(content)
        self.revoked: set[str] = set()

    def refuse(self, token: str | None, path: str) -> str | None:
        """Why the path stays closed, or None when the token opens it."""
        if not token:
            return "no token"
        if token in self.revoked:
            return "token revoked"
        options: Any = {"verify_aud": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, self._key, algorithms=["ES256"], options=options)
        except jwt.InvalidTokenError as error:
            return f"bad token: {type(error).__name__}"
        if time.time() >= claims["exp"]:  # to the fraction of a second, which PyJWT rounds
            return "bad token: expired"
        for scope in claims.get("scope", "").split():
            permission, _, resource = scope.partition(":")
            prefix = resource.rstrip("/")
            if permission == "storage.read" and (path == prefix or path.startswith(prefix + "/")):
                return None
        return "token without a scope for this path"

    def jwks(self) -> str:
        """The public key as a JSON Web Key Set."""
        numbers = self._key.public_numbers()
        x, y = (
            base64.urlsafe_b64encode(n.to_bytes(32, "big")).rstrip(b"=").decode()
            for n in (numbers.x, numbers.y)
        )
        key = {"kty": "EC", "crv": "P-256", "kid": self._key_id, "alg": "ES256", "use": "sig"}
        return json.dumps({"keys": [{**key, "x": x, "y": y}]})


def _key_id(key_pem: bytes) -> str:
    """A name of its own for each key: clients keep an issuer's keys by name for days."""
    return hashlib.sha256(key_pem).hexdigest()[:16]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    ca_key: ec.EllipticCurvePrivateKey,
    host: str | None,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
    if host is None:
        return _sign_ca(builder, ca_key)
    names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.add_extension(usage, critical=False).sign(ca_key, hashes.SHA256())


def _sign_ca(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    off = dict.fromkeys(
        [
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ],
        False,
    )
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **off)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
