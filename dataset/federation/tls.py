"""Which certificate authorities https trusts: the system's, the grid's, or a package's."""

from __future__ import annotations

import os
import ssl
import threading
from contextlib import suppress
from pathlib import Path

_context: ssl.SSLContext | None = None
_context_lock = threading.Lock()


def tls_context() -> ssl.SSLContext:
    """The TLS settings of all: the system's authorities, SSL_CERT_FILE and X509_CERT_DIR."""
    global _context
    with _context_lock:
        if _context is None:
            _context = ssl.create_default_context()
            grid = os.environ.get("X509_CERT_DIR")
            if grid and Path(grid).is_dir():
                _context.load_verify_locations(capath=grid)
            if not _context.cert_store_stats()["x509_ca"]:
                _load_bundled_authorities(_context)
        return _context


def _load_bundled_authorities(context: ssl.SSLContext) -> None:
    """Uses certifi or a known file where the system has no authorities, as in a bare container."""
    places = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"]
    with suppress(ImportError):
        import certifi

        places.insert(0, certifi.where())
    for place in places:
        if Path(place).is_file():
            context.load_verify_locations(cafile=place)
            return
