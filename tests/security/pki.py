"""Certificates for the attack test, made by openssl: an authority, what it signed, and what it did not."""

import subprocess
from pathlib import Path


class Authority:
    def __init__(self, directory, name):
        self.directory = Path(directory)
        self.name = name
        self.certificate = self.directory / f"{name}.pem"
        self._key = self.directory / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-subj", f"/CN={name}",
                 "-keyout", self._key, "-out", self.certificate)

    def sign(self, name, alternatives="DNS:localhost,IP:127.0.0.1", days=30):
        """(certificate, key) of `name`; with days < 0 one that is over."""
        request, certificate, key, extensions = (self.directory / f"{self.name}-{name}.{end}" for end in ["csr", "pem", "key", "ext"])
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}", "-keyout", key,
                 "-out", request)
        extensions.write_text(f"subjectAltName={alternatives}\n")
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", days, "-extfile",
                 extensions, "-out", certificate)
        key.chmod(0o600)
        return certificate, key


def _openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {' '.join(map(str, arguments))}: {done.stderr}")
