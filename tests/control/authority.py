"""A certificate authority of the tests' own, and a server's certificate that it signed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make(folder: Path) -> Path:
    """Write ``server.pem`` and ``server.key`` for localhost into ``folder``; returns the authority's certificate, alone
    in a folder of its own under the name that OpenSSL looks for in one."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")

    def openssl(*words: str) -> str:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *key, "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=tests")
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signed = ("-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", *signed, "-out", "server.pem", "-extfile", "names")
    trusted = folder / "trusted"
    trusted.mkdir()
    authority = trusted / f"{openssl('x509', '-hash', '-noout', '-in', 'ca.pem')}.0"
    return (folder / "ca.pem").rename(authority)
