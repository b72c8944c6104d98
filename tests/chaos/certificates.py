"""Certificates and tokens of a farm, made by openssl. They hold for a century, so that no clock that jumps leaves it."""

import secrets
import subprocess

CONFIG = """
[ca]
default_ca = this
[this]
dir = {directory}
new_certs_dir = {directory}
database = {directory}/index
serial = {directory}/serial
default_md = sha256
policy = any
unique_subject = no
copy_extensions = copy
default_startdate = 20000101000000Z
default_enddate = 20991231000000Z
[any]
commonName = supplied
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical,CA:true
"""


class Certificates:
    def __init__(self, directory, addresses):
        self.directory = directory
        directory.mkdir(mode=0o700)
        (directory / "openssl.cnf").write_text(CONFIG.format(directory=directory))
        (directory / "index").write_text("")
        (directory / "serial").write_text("01\n")
        self._request("authority", "farm", [])
        self._sign("authority", ["-selfsign", "-keyfile", self._key("authority"), "-extensions", "authority"])
        self._make("coordinator", [f"IP:{address}" for address in addresses])
        self._make("worker", [])
        tokens = {role: secrets.token_hex(24) for role in ("worker", "admin")}
        for role, token in tokens.items():
            self._write(f"{role}.token", token + "\n")
        self._write("tokens", "".join(f"{role} {role} {token}\n" for role, token in tokens.items()))

    def _write(self, name, text):
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text)

    def _key(self, name):
        return self.directory / f"{name}.key"

    def _openssl(self, *arguments):
        done = subprocess.run(["openssl", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr}")

    def _request(self, name, common_name, alternatives):
        more = ["-addext", f"subjectAltName={','.join(alternatives)}"] if alternatives else []
        self._openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", self.directory / "openssl.cnf",
                      "-subj", f"/CN={common_name}", "-keyout", self._key(name), "-out", self.directory / f"{name}.request", *more)

    def _sign(self, name, more):
        self._openssl("ca", "-batch", "-notext", "-config", self.directory / "openssl.cnf", "-in", self.directory / f"{name}.request", "-out",
                      self.directory / f"{name}.pem", *more)

    def _make(self, name, alternatives):
        self._request(name, name, alternatives)
        self._sign(name, ["-keyfile", self._key("authority"), "-cert", self.directory / "authority.pem"])

    def of_coordinator(self):
        return ["--tls-cert", self.directory / "coordinator.pem", "--tls-key", self._key("coordinator"), "--tls-client-ca",
                self.directory / "authority.pem", "--token-file", self.directory / "tokens"]

    def of_worker(self):
        return ["--tls-cert", self.directory / "worker.pem", "--tls-key", self._key("worker"), "--tls-ca", self.directory / "authority.pem",
                "--token-file", self.directory / "worker.token"]

    def of_client(self):
        return ["--token-file", self.directory / "admin.token"]
