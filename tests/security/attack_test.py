"""Attacks on a coordinator that other machines can reach: everything is refused and logged, nothing leaks, and it serves on."""

import argparse
import ctypes
import gzip
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))

import http2
from harness import JOB, MIB, Failure, Programs, Sandbox, check
from pki import Authority

ROLES = ["admin", "submit", "read", "worker"]
# What a coordinator may grow by under any of these attacks.
GROWTH = 500 * MIB


def wait_for(what, condition, seconds=30):
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        check(time.monotonic() < end, f"{what}: not within {seconds} s")
        time.sleep(0.02)


class Coordinator:
    """A quernd with TLS on all interfaces, and plaintext with tokens on a unix socket. Knows all secrets, to look for them in the log."""

    def __init__(self, sandbox, source, more=()):
        self.sandbox = sandbox
        self.root = sandbox.directory / "root"
        self.outside = sandbox.directory / "outside"
        for directory in [self.root, self.outside]:
            directory.mkdir(exist_ok=True)
        if not (self.root / "src").exists():
            shutil.copytree(source, self.root / "src")
        (self.outside / "secret.txt").write_text("the secret outside")
        pki = sandbox.directory / "pki"
        pki.mkdir(exist_ok=True)
        self.authority = Authority(pki, "farm-ca")
        self.stranger = Authority(pki, "stranger-ca")
        self.server_certificate, self.server_key = self.authority.sign("coordinator")
        self.client = self.authority.sign("laptop")
        self.tokens = {role: secrets.token_hex(32) for role in ROLES}
        self.token_file = sandbox.directory / "tokens"
        self.write_tokens(self.tokens)
        self.socket = sandbox.runtime / "q.sock"
        self.log = sandbox.directory / "quernd.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(a) for a in [sandbox.programs.quernd, "--in-memory", "--allow-root", self.root, "--listen", "0.0.0.0:0", "--listen",
                                  f"unix:{self.socket}", "--tls-cert", self.server_certificate, "--tls-key", self.server_key,
                                  "--tls-client-ca", self.authority.certificate, "--token-file", self.token_file, *more]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=sandbox.environment, start_new_session=True)
        self.port = int(wait_for("the coordinator listens", self.listening).group(1))
        self.rss = self.memory()

    def listening(self):
        check(self.process.poll() is None, f"the coordinator ended: {self.text()}")
        return re.search(r"listening on 0\.0\.0\.0:(\d+)", self.text()) if "listening on unix" in self.text() else None

    def text(self):
        return self.log.read_text(errors="replace")

    def write_tokens(self, tokens):
        made = self.token_file.with_suffix(".new")
        made.touch(mode=0o600)
        made.write_text("# NAME ROLES TOKEN\n" + "".join(f"{role}-token {role} {token}\n" for role, token in tokens.items()))
        made.rename(self.token_file)

    def file_of(self, token):
        """A file with one token, as clients have it."""
        path = self.sandbox.directory / f"token-{abs(hash(token))}"
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        return path

    def memory(self):
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text()).group(1)) * 1024

    def tls_flags(self, certificate=None, authority=None):
        certificate, key = certificate or self.client
        return ["--tls-ca", authority or self.authority.certificate, "--tls-cert", certificate, "--tls-key", key]

    def quern(self, command, *arguments, token=None, tls=None, server=None):
        """(exit status, stdout, stderr) of a client that comes over TLS."""
        flags = ["--server", server or f"127.0.0.1:{self.port}"]
        flags += self.tls_flags() if tls is None else tls
        if token is not None:
            flags += ["--token-file", self.file_of(token)]
        return self.sandbox.run([self.sandbox.programs.quern, command, *arguments, *flags], timeout=120)

    def connect(self, certificate=None, timeout=30):
        """A TLS connection for frames by hand."""
        context = ssl.create_default_context(cafile=self.authority.certificate)
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout), server_hostname="localhost")

    def check_serves(self):
        check(self.process.poll() is None, f"the coordinator ended: {self.text()[-3000:]}")
        # It may be busy closing what an attack has left.
        status = wait_for("the coordinator serves on", lambda: self.quern("jobs", token=self.tokens["read"])[0] == 0, 60)
        check(status, "it does not serve on")

    def check_memory(self, what):
        grown = self.memory() - self.rss
        check(grown < GROWTH, f"{what}: the coordinator grew by {grown / MIB:.0f} MiB")
        print(f"  {what}: the coordinator grew by {grown / MIB:.0f} MiB")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        check(self.process.wait(timeout=30) == 0, f"the coordinator ended badly: {self.text()[-3000:]}")


def start_is_refused(sandbox, source):
    """What would let strangers in does not start, and says what to do."""
    pki = sandbox.directory / "start-pki"
    pki.mkdir()
    authority = Authority(pki, "ca")
    certificate, key = authority.sign("coordinator")
    other_certificate, _ = authority.sign("other")
    expired, expired_key = authority.sign("expired", days=-1)
    tokens = sandbox.directory / "start-tokens"
    tokens.write_text(f"ci submit {secrets.token_hex(32)}\n")
    tokens.chmod(0o600)
    readable = sandbox.directory / "readable-tokens"
    readable.write_text(f"ci submit {secrets.token_hex(32)}\n")
    readable.chmod(0o644)
    tls = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", authority.certificate]

    def start(*flags):
        return sandbox.run([sandbox.programs.quernd, "--in-memory", "--allow-root", source, "--listen", "0.0.0.0:0", *flags], timeout=30)

    for flags, status, said in [
            ([], 2, "neither TLS nor tokens"), (tls, 2, "Give --token-file"), (["--token-file", tokens], 2, "in the clear"),
            ([*tls[:4], "--token-file", tokens], 2, "go together"), ([*tls, "--token-file", readable], 1, "chmod 600"),
            ([*tls, "--token-file", sandbox.directory / "none"], 1, "No such file"),
            (["--tls-cert", other_certificate, *tls[2:], "--token-file", tokens], 1, "is not the key of"),
            (["--tls-cert", expired, "--tls-key", expired_key, *tls[4:], "--token-file", tokens], 1, "was valid until")]:
        code, _, err = start(*flags)
        check(code == status and said in err, f"quernd {flags}: status {code}, {err}")


def strangers_are_refused(coordinator):
    """No certificate, one of another authority, an old one: no call gets through. So does nobody who pretends to be the coordinator."""
    foreign = coordinator.stranger.sign("laptop")
    expired = coordinator.authority.sign("expired", days=-1)
    admin = coordinator.tokens["admin"]
    for name, certificate in [("none", None), ("foreign", foreign), ("expired", expired)]:
        try:
            connection = http2.Connection(coordinator.connect(certificate)).start()
            connection.call(1, http2.grpc_headers("/quern.v1.Jobs/ListJobs", admin))
            # TLS 1.3 tells of a certificate that is not taken after the handshake.
            answered = connection.until_ended(1)
            check(not answered, f"a client with the certificate \"{name}\" was answered: {connection.text}")
        except ssl.SSLError:
            pass
    code, _, err = coordinator.quern("jobs", token=admin, tls=coordinator.tls_flags(certificate=foreign))
    check(code == 1 and "no coordinator answers" in err, f"foreign certificate: {code} {err}")
    code, _, err = coordinator.quern("jobs", token=admin, tls=coordinator.tls_flags(certificate=expired))
    check(code == 2 and "was valid until" in err, f"expired certificate: {code} {err}")
    code, _, err = coordinator.quern("jobs", token=admin, tls=coordinator.tls_flags(authority=coordinator.stranger.certificate))
    check(code == 1 and "did not sign" in err, f"a coordinator that the client's authority did not sign: {code} {err}")
    code, _, err = coordinator.quern("jobs", token=admin, tls=[], server=f"192.0.2.1:{coordinator.port}")
    check(code == 2 and "in the clear" in err, f"a token without TLS: {code} {err}")
    # In the clear, to the port that speaks TLS.
    plain = http2.Connection(socket.create_connection(("127.0.0.1", coordinator.port), 30)).start()
    try:
        plain.call(1, http2.grpc_headers("/quern.v1.Jobs/ListJobs", admin))
        check(not plain.until_ended(1), "an answer in the clear")
    except ConnectionError:
        pass
    coordinator.check_serves()


def tokens_are_needed(coordinator):
    """No token, a wrong one, a role too low; over TLS and over the unix socket."""
    source, out = coordinator.root / "src", coordinator.root / "none"
    unix = f"unix:{coordinator.socket}"
    for server, tls in [(None, None), (unix, [])]:
        for token, command, code, said in [
                (None, ["jobs"], 1, "asks for a token"), (secrets.token_hex(32), ["jobs"], 1, "none of this coordinator's"),
                (coordinator.tokens["worker"], ["jobs"], 1, 'has the role worker; this call needs read,submit,admin'),
                (coordinator.tokens["read"], ["submit", source, "-o", out, *JOB], 1, "has the role read; this call needs submit,admin"),
                (coordinator.tokens["read"], ["cancel", "jobs/1"], 1, "needs submit,admin"), (coordinator.tokens["read"], ["jobs"], 0, ""),
                (coordinator.tokens["submit"], ["workers"], 0, ""), (coordinator.tokens["admin"], ["jobs"], 0, "")]:
            status, _, err = coordinator.quern(*command, token=token, tls=tls, server=server)
            check(status == code and said in err, f"{command} at {server}: status {status}, {err}")
    check(not out.exists(), "a refused job left something")
    # By hand: what no client of ours would send.
    for headers in [[], [("authorization", "Basic Zm9vOmJhcg==")], [("authorization", f"Bearer {coordinator.tokens['admin']}x")],
                    [("authorization", "Bearer ")], [("authorization", f"Bearer {coordinator.tokens['read']}")] * 2]:
        for method in ["/quern.v1.Jobs/ListJobs", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]:
            connection = http2.Connection(coordinator.connect(coordinator.client)).start()
            connection.call(1, http2.grpc_headers(method, more=headers))
            check(connection.until_ended(1), "the connection was closed")
            check(b"token" in connection.text[1] and 1 not in connection.data, f"{method} with {headers}: {connection.text[1]}")
    # The log takes so many refusals a second, and those above were more: this one is made until it has its line.
    def unknown_method_is_logged():
        nonlocal connection
        connection = http2.Connection(coordinator.connect(coordinator.client)).start()
        connection.call(1, http2.grpc_headers("/quern.v1.Jobs/NoSuchMethod", coordinator.tokens["admin"]))
        check(connection.until_ended(1) and b"no such method" in connection.text[1], "an unknown method was answered")
        return "NoSuchMethod" in coordinator.text()
    wait_for("the unknown method is in the log", unknown_method_is_logged)
    # Probes have no token.
    connection.call(3, http2.grpc_headers("/grpc.health.v1.Health/Check"))
    connection.socket.sendall(http2.frame(http2.DATA, http2.END_STREAM, 3, http2.message(b"")))
    check(connection.until_ended(3) and connection.data.get(3, 0) > 0, f"the health check was not answered: {connection.text}")
    log = coordinator.text()
    check(re.search(r"audit event=refused who=token:read-token certificate=laptop .*method=/quern.v1.Jobs/CreateJob", log),
          f"the refusal is not in the log: {log[-3000:]}")
    check(re.search(rf"audit event=refused who=token:read-token .*from=uid:{os.getuid()} ", log), "the user is not in the log")


def a_worker_joins(coordinator):
    """The way it is meant to be, with tokens and certificates for all; and with a token that is not a worker's."""
    worker = coordinator.authority.sign("node7")
    out = coordinator.root / "out"
    flags = ["--server", f"127.0.0.1:{coordinator.port}", "--memory", "64MiB", "--threads", "1", *coordinator.tls_flags(worker)]
    log = coordinator.sandbox.log
    wrong = coordinator.sandbox.start([coordinator.sandbox.programs.worker, *flags, "--name", "impostor", "--token-file",
                                       coordinator.file_of(coordinator.tokens["submit"])])
    wait_for("the worker is refused", lambda: "needs worker,admin" in log.read_text())
    wrong.send_signal(signal.SIGINT)
    wrong.wait(timeout=30)
    _, listed, _ = coordinator.quern("workers", token=coordinator.tokens["read"])
    check("impostor" not in listed, f"it was let in: {listed}")
    right = coordinator.sandbox.start([coordinator.sandbox.programs.worker, *flags, "--name", "node7", "--token-file",
                                       coordinator.file_of(coordinator.tokens["worker"])])
    code, _, err = coordinator.quern("submit", coordinator.root / "src", "-o", out, *JOB, token=coordinator.tokens["submit"])
    check(code == 0 and (out / "quern_manifest.json").exists(), f"the job did not succeed: {code} {err}")
    right.send_signal(signal.SIGTERM)
    check(right.wait(timeout=60) == 0, "the worker did not leave")
    check(re.search(r"audit event=call who=token:submit-token certificate=laptop from=ipv4:127\.0\.0\.1:\d+ method=CreateJob "
                    r"target=jobs/\d+ output=\S+/root/out result=OK", coordinator.text()), f"no audit line: {coordinator.text()[-3000:]}")


def paths_stay_below_the_roots(coordinator):
    """Outside of --allow-root nothing is read, made, or told of, whatever a path looks like."""
    root, outside, token = coordinator.root, coordinator.outside, coordinator.tokens["submit"]
    (root / "link").symlink_to(outside)
    (root / "up").symlink_to("../outside")
    (root / "magic").symlink_to("/proc/self/root")
    model = root / "linked"
    model.mkdir(exist_ok=True)
    (outside / "checkpoint").mkdir(exist_ok=True)
    for file in (root / "src").iterdir():
        shutil.copy(file, outside / "checkpoint")
        (model / file.name).symlink_to(outside / "checkpoint" / file.name)

    def submit(source, out, *more):
        return coordinator.quern("submit", source, "-o", out, *JOB, "--detach", *more, token=token)

    # The client resolves what exists on this machine; a stranger's client would not. So the paths are sent by hand, too.
    for out in [outside / "new", root / "link" / "new", root / "up" / "new", root / "magic" / "tmp" / "new", root / ".." / "outside" / "new",
                root / "src" / ".." / ".." / "outside" / "new", f"//{outside}/new", "/etc/quern-attack"]:
        code, _, err = submit(root / "src", out)
        check(code == 1 and "what this coordinator may touch" in err, f"-o {out}: {code} {err}")
    answers = set()
    for path in [outside, outside / "none", outside / "checkpoint", root / ".." / "outside" / "checkpoint", "/root", "/no/such/place",
                 root / "link" / "checkpoint", root / "link" / "none", "/proc/self/root/etc", f"{root}/../../../../../../etc"]:
        text = inspect_by_hand(coordinator, str(path))
        check(b"what this coordinator may touch" in text, f"inspect {path}: {text}")
        answers.add(text.replace(percent(str(path)), b"PATH", 1))
    check(len(answers) == 1, f"answers tell what exists: {answers}")
    for path in ["src", "../outside", "", "\0/etc", f"{root}\0/../outside"]:
        text = inspect_by_hand(coordinator, path)
        check(b"no absolute path" in text or b"NUL" in text or b"not part of what this" in text, f"inspect {path!r}: {text}")
    for encoded in [f"{root}/%2e%2e/outside/checkpoint", f"{root}/..%2foutside", f"{root}/\u2025/outside", f"{root}/\uff0e\uff0e/outside"]:
        text = inspect_by_hand(coordinator, encoded)
        check(b"outside/checkpoint" not in text or b"no directory" in text or b"No such" in text, f"inspect {encoded}: {text}")
    # Each file of this one is a link that leads out.
    text = inspect_by_hand(coordinator, str(model))
    check(b"ermission" in text, f"inspect of links that lead out: {text}")
    code, _, err = submit(model, root / "from-links")
    check(code == 1 and "ermission" in err, f"a source of links that lead out: {code} {err}")
    for flag in ["--activation-scales", "--importance"]:
        code, _, err = submit(root / "src", root / "scales-out", flag, outside / "secret.txt")
        check(code == 1 and "what this coordinator may touch" in err, f"{flag}: {code} {err}")
    left = sorted(p.name for p in outside.iterdir())
    check(left == ["checkpoint", "secret.txt"], f"outside holds {left}")
    check((outside / "secret.txt").read_text() == "the secret outside", "the secret was written to")


def percent(text):
    """As gRPC writes it in grpc-message."""
    return b"".join(bytes([c]) if 0x20 <= c <= 0x7E and c != 0x25 else b"%%%02X" % c for c in text.encode())


def text_field(number, value):
    value = value.encode()
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value):
    encoded = b""
    while value >= 128:
        encoded += bytes([value % 128 + 128])
        value //= 128
    return encoded + bytes([value])


def inspect_by_hand(coordinator, path):
    connection = http2.Connection(coordinator.connect(coordinator.client)).start()
    connection.call(1, http2.grpc_headers("/quern.v1.Jobs/InspectCheckpoint", coordinator.tokens["submit"]))
    connection.socket.sendall(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(text_field(1, path))))
    check(connection.until_ended(1), "the connection was closed")
    connection.socket.close()
    check(1 not in connection.data, f"inspect {path!r} was answered")
    return http2.grpc_message(connection.text[1])


def ask_for_result(coordinator, name, token):
    """A ticket for a file of the first job's result, or what the coordinator has against it."""
    code, listed, err = coordinator.quern("jobs", "--json", token=coordinator.tokens["read"])
    check(code == 0, err)
    job = next(job["name"] for job in json.loads(listed)["jobs"] if job["state"] == "SUCCEEDED")
    connection = http2.Connection(coordinator.connect(coordinator.client)).start()
    connection.call(1, http2.grpc_headers("/quern.v1.Data/ReadResult", coordinator.tokens[token]))
    connection.socket.sendall(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(text_field(1, job) + text_field(2, name))))
    check(connection.until_ended(1), "the connection was closed")
    connection.socket.close()
    answer = connection.body.get(1, b"")
    return (answer[7:].decode(), b"") if answer else (None, http2.grpc_message(connection.text[1]))


def greeting(ticket):
    return b"quern-data/1 " + hashlib.sha256(ticket.encode()).hexdigest()[:32].encode() + b"\n"


def use_ticket(coordinator, ticket, certificate=None, show=None, tls=True, greet=None):
    """What comes over a data connection, until its end: b"" for one that is refused."""
    connection = socket.create_connection(("127.0.0.1", coordinator.port), 30)
    try:
        connection.sendall(greeting(ticket) if greet is None else greet)
        if tls:
            context = ssl.create_default_context(cafile=coordinator.authority.certificate)
            if certificate is not None:
                context.load_cert_chain(*certificate)
            connection = context.wrap_socket(connection, server_hostname="localhost")
        connection.sendall((show or ticket).encode())
        came = b""
        while block := connection.recv(65536):
            came += block
        return came
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        connection.close()


def data_connections_need_tickets(coordinator):
    """The data plane's connections: no ticket, one that was used, one that is another's, no TLS, wrong certificates."""
    ticket, text = ask_for_result(coordinator, "config.json", "read")
    check(ticket is not None and re.fullmatch("[0-9a-f]{64}", ticket), f"no ticket: {text}")
    client, config = coordinator.client, (coordinator.root / "out" / "config.json").read_bytes()
    foreign, expired = coordinator.stranger.sign("laptop"), coordinator.authority.sign("expired", days=-1)
    other = secrets.token_hex(32)
    for what, came in [
            ("a ticket that nobody gave", use_ticket(coordinator, other, client)),
            ("the name of one ticket with another", use_ticket(coordinator, ticket, client, show=other)),
            ("its name in place of a ticket", use_ticket(coordinator, ticket, client, show=(greeting(ticket)[13:45] * 2).decode())),
            ("a ticket in the clear", use_ticket(coordinator, ticket, tls=False)),
            ("no certificate", use_ticket(coordinator, ticket)),
            ("a foreign certificate", use_ticket(coordinator, ticket, foreign)),
            ("an expired certificate", use_ticket(coordinator, ticket, expired))]:
        check(came == b"", f"{what} got {came[:100]}")
    came = use_ticket(coordinator, ticket, client)
    check(config in came, f"the right ticket got {came[:100]}")
    check(use_ticket(coordinator, ticket, client) == b"", "a ticket was good twice")
    # By the unix socket, which speaks no TLS, a ticket is as good.
    ticket, _ = ask_for_result(coordinator, "config.json", "read")
    local = socket.socket(socket.AF_UNIX)
    local.connect(str(coordinator.socket))
    local.sendall(greeting(ticket) + ticket.encode())
    came = b""
    while block := local.recv(65536):
        came += block
    check(config in came, f"the right ticket got {came[:100]} at the socket")
    # Nobody gets a thread without a ticket that is good.
    threads = len(os.listdir(f"/proc/{coordinator.process.pid}/task"))
    flood = []
    for i in range(300):
        connection = socket.create_connection(("127.0.0.1", coordinator.port), 30)
        connection.sendall(greeting(secrets.token_hex(32)) if i % 3 else b"quern-data/1 " + b"\xff" * 20)
        flood.append(connection)
    more = len(os.listdir(f"/proc/{coordinator.process.pid}/task")) - threads
    check(more < 20, f"connections without tickets took {more} threads")
    for connection in flood:
        connection.close()
    # One that begins as it should and then says nothing is given up, and its ticket is good still.
    ticket, _ = ask_for_result(coordinator, "config.json", "read")
    silent = socket.create_connection(("127.0.0.1", coordinator.port), 30)
    silent.sendall(greeting(ticket))
    check(use_ticket(coordinator, ticket, client), "another one's silence made a ticket useless")
    wait_for("a silent data connection is given up", lambda: is_closed(silent))
    silent.close()
    log = coordinator.text()
    for reason in ["there is no such ticket", "the ticket is wrong", "unable to get local issuer certificate", "certificate has expired",
                   "peer did not return a certificate", "wrong version number", "nothing has moved"]:
        check(re.search(rf"audit event=data_connection_refused from=ipv4:127\.0\.0\.1:\d+ reason=.*{reason}", log), f"\"{reason}\" is not in the log")
    check(ticket not in log, "the log holds a ticket")
    coordinator.check_serves()


def results_hold_nothing_else(coordinator):
    """Who may read results gets the files that their manifest lists, by their names there, and nothing by any other."""
    def read(name, token):
        ticket, text = ask_for_result(coordinator, name, token)
        return (0, text) if ticket is None else (len(use_ticket(coordinator, ticket, coordinator.client)), text)

    sent, text = read("config.json", "read")
    check(sent > 0, f"config.json was not sent: {text}")
    for name in ["", ".", "..", "../src/config.json", "./config.json", "/etc/passwd", f"{coordinator.outside}/secret.txt", ".quern/run.json",
                 "config.json/", "config.json\0", "config.json\0/../x", "%2e%2e/src/config.json", "..%2fsrc%2fconfig.json", "\u2025/src/config.json",
                 "CONFIG.JSON", "a" * 5000]:
        sent, text = read(name, "read")
        check(sent == 0 and b"no file" in text, f"{name[:50]!r} was answered with {sent} bytes: {text[:200]}")
    sent, text = read("config.json", "worker")
    check(sent == 0 and b"needs read" in text, f"a worker's token got {sent} bytes of a result: {text}")


def races_do_not_lead_out(coordinator):
    """A directory below the root and a link that leads out change places all the time while jobs are given that write there."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap, spare = coordinator.root / "swap", coordinator.root / "spare"
    swap.mkdir()
    spare.symlink_to(coordinator.outside)
    done = threading.Event()
    swaps = [0]

    def exchange():
        while not done.wait(0.02):  # long enough for some jobs to get through
            if libc.renameat2(-100, str(swap).encode(), -100, str(spare).encode(), 2) == 0:
                swaps[0] += 1

    before = sorted(coordinator.outside.rglob("*"))
    attacker = threading.Thread(target=exchange)
    attacker.start()
    accepted = refused = 0
    try:
        for i in range(40):
            code, _, err = coordinator.quern("submit", coordinator.root / "src", "-o", swap / f"out{i}", *JOB, "--detach",
                                             token=coordinator.tokens["submit"])
            check(code in (0, 1), f"submit: {code} {err}")
            accepted += code == 0
            refused += code == 1
    finally:
        done.set()
        attacker.join()
    check(swaps[0] > 30, f"only {swaps[0]} exchanges")
    check(sorted(coordinator.outside.rglob("*")) == before, f"outside has changed: {sorted(coordinator.outside.rglob('*'))}")
    print(f"  races: {swaps[0]} exchanges, {accepted} jobs accepted, {refused} refused, nothing outside")


def contents(directory):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(directory.rglob("*"))}


def planted_links_lead_nowhere(coordinator):
    """While jobs are written, their outputs and directories in them change places with links to a directory of somebody else below the same
    root. Neither the coordinator nor a worker that writes there itself changes anything in it, and the jobs end well once that is over."""
    libc = ctypes.CDLL(None, use_errno=True)
    victim, link, token = coordinator.root / "victim", coordinator.root / "planted", coordinator.tokens["submit"]
    for name in ["", "attempts", "publish", ".quern", ".quern/attempts", ".quern/publish"]:
        (victim / name).mkdir(exist_ok=True)
        for file in ["0.1", "1.1", "2.1", "0", "1", "sight", "config.json", "run.json"]:
            (victim / name / file).write_text("mine")
    link.symlink_to(victim)
    untouched = contents(victim)
    worker = coordinator.sandbox.start([
        coordinator.sandbox.programs.worker, "--server", f"127.0.0.1:{coordinator.port}", "--memory", "64MiB", "--threads", "1", "--name", "writer",
        *coordinator.tls_flags(), "--token-file", coordinator.file_of(coordinator.tokens["worker"])])
    swaps, failed = 0, 0
    shards = ["--max-shard-size", "512KiB"]

    def exchange(place):
        return libc.renameat2(-100, str(place).encode(), -100, str(link).encode(), 2) == 0

    for i in range(6):
        out = coordinator.root / f"planted-out{i}"
        done = threading.Event()

        def attack(place):
            nonlocal swaps
            while not done.wait(0.005):
                if exchange(place):
                    swaps += 1
                    time.sleep(0.02)
                    if not exchange(place):
                        # The link was removed, as what it took the place of would have been.
                        link.rename(coordinator.root / f"planted-gone{swaps}")
                        link.symlink_to(victim)

        attacker = threading.Thread(target=attack, args=([out / ".quern" / "attempts", out / ".quern", out][i % 3],))
        attacker.start()
        try:
            code, _, err = coordinator.quern("submit", coordinator.root / "src", "-o", out, *JOB, *shards, token=token)
            if code != 0 and i % 2:
                job = re.search(r"jobs/\d+", err)
                if job:
                    coordinator.quern("delete", job[0], token=token)
        finally:
            done.set()
            attacker.join()
        check(contents(victim) == untouched, f"job {i} ({code} {err}) changed what a link led to: "
              f"{sorted({name for name, _ in contents(victim).items() ^ untouched.items()})}")
        failed += code != 0
        if code != 0:
            check("symbolic link" in err or "No such file" in err, f"job {i}: {err}")
            code, _, err = coordinator.quern("submit", coordinator.root / "src", "-o", out, *JOB, *shards, token=token)
        check(code == 0 and (out / "quern_manifest.json").exists(), f"job {i} did not end well without the links: {code} {err}")
    worker.send_signal(signal.SIGTERM)
    check(worker.wait(timeout=60) == 0, "the worker did not leave")
    check(swaps >= 6 and failed > 0, f"{swaps} exchanges, {failed} jobs failed of them: no attack")
    print(f"  planted links: {swaps} exchanges, {failed} of 6 jobs failed at first, nothing changed behind them")


def messages_are_limited(coordinator):
    """Oversized messages, bombs, endless headers and frames that are none."""
    submit, read = coordinator.tokens["submit"], coordinator.tokens["read"]

    def connect():
        return http2.Connection(coordinator.connect(coordinator.client)).start()

    # Without a right the message is not even read.
    connection = connect()
    connection.call(1, http2.grpc_headers("/quern.v1.Jobs/CreateJob", read))
    huge = http2.message(bytes(65 * MIB))
    check(not connection.send(1, huge), "65 MiB of a call that was refused were taken")
    # With it, up to the limit.
    connection = connect()
    connection.call(1, http2.grpc_headers("/quern.v1.Jobs/CreateJob", submit))
    check(not connection.send(1, huge) or connection.until_ended(1), "an oversized message was taken")
    check(1 not in connection.data, f"an answer to an oversized message: {connection.text}")
    # One that says 4 GiB and goes on, to a method that needs no token.
    connection = connect()
    connection.call(1, http2.grpc_headers("/grpc.health.v1.Health/Check"))
    endless, sent = b"\0\xff\xff\xff\xff" + bytes(16 * MIB), 0
    while sent < 1536 * MIB and connection.send(1, endless):
        endless, sent = endless[5:] if sent == 0 else endless, sent + 16 * MIB
    print(f"  a message without end was cut off after {sent / MIB:.0f} MiB")
    check(sent < 1536 * MIB and 1 not in connection.data, "a message of 4 GiB was taken")
    # Compressed, a thousand times as much.
    bomb = gzip.compress(bytes(200 * MIB))
    connection = connect()
    connection.call(1, http2.grpc_headers("/quern.v1.Jobs/CreateJob", submit, [("grpc-encoding", "gzip")]))
    connection.send(1, http2.message(bomb, compressed=True))
    connection.until_ended(1)
    check(1 not in connection.data, f"an answer to a bomb: {connection.text}")
    coordinator.check_memory("oversized and compressed messages")
    # Headers: too large, and never ending.
    for headers in [[("x-long", "a" * 200_000)], [(f"x-{i}", "b" * 100) for i in range(2000)]]:
        connection = connect()
        block = http2.header_block(http2.grpc_headers("/quern.v1.Jobs/ListJobs", read, headers))
        try:
            connection.socket.sendall(http2.frame(http2.HEADERS, 0, 1, block[:16000]))
            for i in range(16000, len(block), 16000):
                connection.socket.sendall(http2.frame(http2.CONTINUATION, http2.END_HEADERS if i + 16000 >= len(block) else 0, 1,
                                                      block[i:i + 16000]))
            connection.until_ended(1)
        except ConnectionError:
            pass
        check(1 not in connection.data, f"an answer to huge headers: {connection.text}")
        check(b"bytes of metadata" in connection.text.get(1, b"bytes of metadata"), f"not for their size: {connection.text}")
    # Malformed frames, seeded.
    import random
    draw = random.Random(7)
    for i in range(200):
        try:
            connection = connect() if i % 2 else http2.Connection(coordinator.connect(coordinator.client))
            connection.socket.settimeout(5)
            for _ in range(draw.randrange(1, 20)):
                kind = draw.randrange(256) if draw.random() < 0.3 else draw.randrange(10)
                connection.socket.sendall(http2.frame(kind, draw.randrange(256), draw.choice([0, 1, 2, 3, 0x7FFFFFFF, 0xFFFFFFFF]),
                                                      draw.randbytes(draw.randrange(64))))
            connection.socket.close()
        except OSError:
            pass
    for garbage in [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(100), secrets.token_bytes(5000), b"\x16\x03\x01\xff\xff" + bytes(100)]:
        for address in [("127.0.0.1", coordinator.port), str(coordinator.socket)]:
            raw = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
            raw.settimeout(30)
            raw.connect(address)
            try:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            except ConnectionError:
                pass
            raw.close()
    coordinator.check_memory("malformed frames")
    coordinator.check_serves()


def slow_clients_are_cut_off(coordinator):
    """A stream that its client does not read, and a connection that never says what it is."""
    silent = socket.create_connection(("127.0.0.1", coordinator.port), 30)
    watched = http2.Connection(coordinator.connect(coordinator.client))
    # No window for any stream.
    watched.socket.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
    watched.call(1, http2.grpc_headers("/quern.v1.Jobs/WatchJob", coordinator.tokens["read"]))
    watched.socket.sendall(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(text_field(1, "jobs/1"))))
    start = time.monotonic()
    check(watched.until_ended(1), "the connection was closed")
    elapsed = time.monotonic() - start
    print(f"  a stream that is not read ended after {elapsed:.1f} s")
    check(elapsed > 1, f"it ended by itself: {watched.text}")
    check(1 not in watched.data, "something was sent without a window")
    silent.settimeout(60)
    try:
        while silent.recv(4096):
            pass
    except ConnectionError:
        pass
    print(f"  a silent connection ended after {time.monotonic() - start:.1f} s")
    coordinator.check_serves()


def floods_are_bounded(sandbox, source):
    """10,000 connections that say nothing: so many as are allowed stay until they have had their time, and it serves on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(10_000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    coordinator = Coordinator(sandbox, source, ["--max-connections", "1000"])
    idle = []
    try:
        for i in range(wanted):
            if i % 2:
                connection = socket.create_connection(("127.0.0.1", coordinator.port), 30)
            else:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(coordinator.socket))  # waits while the backlog is full, which one with a timeout does not
                connection.settimeout(30)
            idle.append(connection)
        descriptors = len(os.listdir(f"/proc/{coordinator.process.pid}/fd"))
        check(descriptors < 1000 + 300, f"the coordinator has {descriptors} descriptors")
        coordinator.check_memory(f"{wanted} idle connections")
        # They are all there still, and cost nothing any more.
        coordinator.check_serves()
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check("there are 1000 connections" in coordinator.text(), "the refusal is not in the log")
    coordinator.stop()


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def one_client_does_not_take_all(sandbox, source):
    """One address with many connections, and one token with many calls, are refused more of them; others are served."""
    coordinator = Coordinator(sandbox, source, ["--max-connections-per-address", "100", "--max-calls-per-client", "40"])
    greedy = [socket.create_connection(("127.0.0.1", coordinator.port), 30, source_address=("127.0.0.2", 0)) for _ in range(400)]
    try:
        wait_for("the refusal is in the log", lambda: "there are 100 connections of 127.0.0.2" in coordinator.text())
        # Those that were refused are closed; of the others the server waits for a word.
        check(wait_for("connections of one address are refused", lambda: sum(map(is_closed, greedy)) >= 300), "they are not")
        coordinator.check_serves()
    finally:
        for connection in greedy:
            connection.close()
    # Calls that stay open, as a client's that watches.
    token, name = coordinator.tokens["read"], coordinator.client
    connection = http2.Connection(coordinator.connect(name)).start()
    streams = range(1, 2 * 60, 2)
    for stream in streams:
        connection.call(stream, http2.grpc_headers("/grpc.health.v1.Health/Watch", token))
        connection.send(stream, http2.message(b""))
        if stream < 80:
            # Open, before the next one is judged.
            while stream not in connection.data:
                received = connection.next_frame()
                check(received is not None, "the connection was closed")
                connection.handle(received)
    for stream in streams[40:]:
        check(connection.until_ended(stream) and b"calls open" in connection.text[stream], f"call {stream} of one client: {connection.text}")
    check(not connection.ended & set(streams[:40]), f"calls were ended: {sorted(connection.ended)}")
    code, _, err = coordinator.quern("jobs", token=token)
    check(code != 0 and "token:read-token certificate:laptop has 40 calls open" in err, f"the greedy client was served: {code} {err}")
    check("event=refused who=token:read-token" in coordinator.text(), "the refusal is not in the log")
    code, _, err = coordinator.quern("jobs", token=coordinator.tokens["admin"])
    check(code == 0, f"another client was not served: {err}")
    connection.socket.close()
    wait_for("the calls are over", lambda: coordinator.quern("jobs", token=token)[0] == 0)
    coordinator.stop()


def all_of_it_is_logged(coordinator):
    """After the attacks above: a line of each kind of refusal, that says who and why."""
    log = coordinator.text()
    for what, line in [
            ("no token", r'audit event=refused who=remote certificate=laptop from=remote method=/quern.v1.Jobs/ListJobs reason="this coordinator asks'),
            ("a wrong token", r'audit event=refused who=remote certificate=laptop \S+ method=/quern.v1.Jobs/ListJobs reason="the token is none of'),
            ("no token at the socket", rf'audit event=refused who=uid:{os.getuid()} \S+ \S+ method=/quern.v1.Jobs/ListJobs reason="this coordinator'),
            ("a role too low", r'audit event=refused who=token:read-token .*method=/quern.v1.Jobs/CreateJob reason=.*has the role read'),
            ("a method that there is not", r'audit event=refused .*method=/quern.v1.Jobs/NoSuchMethod reason="there is no such method'),
            ("a foreign or expired certificate", r"grpc: Handshake failed .*certificate verify failed"),
            ("no certificate", r"grpc: Handshake failed .*peer did not return a certificate"),
            ("no TLS", r"grpc: Handshake failed .*(wrong version number|http request|packet length too long)"),
            ("an output outside", r"audit event=call who=token:submit-token .*method=CreateJob output=\S+/outside/new result=PERMISSION_DENIED"),
            ("a source outside", r"audit event=call who=token:submit-token .*method=InspectCheckpoint result=PERMISSION_DENIED"),
            ("too much metadata", r'audit event=refused .*reason="the call has more than 16384 bytes of metadata"'),
            ("a compressed message", r"grpc: Compression algorithm 'gzip' is disabled"),
            ("connections", r"audit event=connection listener=\S+ from=ipv4:127\.0\.0\.1:\d+")]:
        check(re.search(line, log), f"{what} is not in the log")


def secrets_are_reloaded(coordinator):
    """New tokens and a new certificate, without a restart; a broken file changes nothing."""
    old, new = coordinator.tokens["read"], secrets.token_hex(32)

    def serves(token):
        return coordinator.quern("jobs", token=token)[0] == 0

    check(serves(old) and not serves(new), "before the change")
    coordinator.tokens["read"] = new
    coordinator.write_tokens(coordinator.tokens)
    coordinator.process.send_signal(signal.SIGHUP)
    wait_for("the new token is taken", lambda: serves(new))
    check(not serves(old), "the old token is taken still")
    coordinator.token_file.write_text("nonsense SECRETSECRETSECRETSECRETSECRETSECRET\n")
    wait_for("the broken file is told of", lambda: "tokens_not_reloaded" in coordinator.text())
    check(serves(new), "after a broken file")
    check("SECRETSECRET" not in coordinator.text(), "the log quotes the token file")
    coordinator.write_tokens(coordinator.tokens)

    def serial():
        with coordinator.connect(coordinator.client) as connection:
            return connection.getpeercert()["serialNumber"]

    before = serial()
    certificate, key = coordinator.authority.sign("coordinator-renewed")
    os.replace(key, coordinator.server_key)
    os.replace(certificate, coordinator.server_certificate)
    wait_for("the new certificate is shown", lambda: serial() != before)
    check(serves(new), "after the change of certificates")
    wait_for("the log tells of it", lambda: "audit event=certificate name=coordinator-renewed" in coordinator.text())


def metrics_let_nobody_in(coordinator):
    """Their port serves figures and nothing else, names no secret, and holds up nobody but those who ask it."""
    port = int(re.search(r"metrics on http://127\.0\.0\.1:(\d+)", coordinator.text()).group(1))

    def ask(request):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(1 << 16), b""))
            except ConnectionError:
                return b""

    figures = ask(b"GET /metrics HTTP/1.0\r\n\r\n")
    check(figures.startswith(b"HTTP/1.1 200"), f"no metrics: {figures[:200]}")
    refused = re.search(rb'quern_calls_refused_total\{code="unauthenticated"\} (\d+)', figures)
    check(refused and int(refused[1]) > 0, "the calls without a token are not counted")
    for secret in [*coordinator.tokens.values(), str(coordinator.root), "laptop"]:
        check(secret.encode() not in figures, f"the metrics hold {secret}")
    for page in [b"/healthz", b"/readyz"]:
        answer = ask(b"GET " + page + b" HTTP/1.0\r\n\r\n")
        check(answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nok\n"), f"{page}: {answer}")
    for request in [b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n", b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.0\r\n\r\n",
                    b"GET / HTTP/1.0\r\n\r\n", b"PUT /x HTTP/1.0\r\nContent-Length: 4\r\n\r\nabcd", b"\0" * 4096,
                    b"GET /metrics HTTP/1.0\r\nX: " + b"x" * (8 * MIB)]:
        answer = ask(request)
        check(not answer.startswith(b"HTTP/1.1 200") and b"root:" not in answer, f"{request[:40]} was answered: {answer[:200]}")
    idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(50)]
    for connection in idle:
        connection.sendall(b"GET /metrics HT")
    start = time.monotonic()
    code, _, err = coordinator.quern("jobs", token=coordinator.tokens["read"])
    check(code == 0 and time.monotonic() - start < 10, f"who holds connections to the metrics holds up the coordinator: {code} {err}")
    for connection in idle:
        connection.close()
    wait_for("it serves metrics again", lambda: ask(b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200"))


def local_users_are_named(sandbox, source):
    """Without tokens a unix socket is for who may open it, and the log says who that was."""
    path = sandbox.runtime / "u.sock"
    log = sandbox.directory / "unix.log"
    with open(log, "ab") as out:
        process = subprocess.Popen([str(a) for a in [sandbox.programs.quernd, "--in-memory", "--allow-root", sandbox.directory, "--listen",
                                                     f"unix:{path}", "--socket-mode", "0600"]],
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=sandbox.environment, start_new_session=True)
    wait_for("it listens", lambda: "listening on" in log.read_text())
    check(path.stat().st_mode & 0o777 == 0o600, f"mode {path.stat().st_mode:o}")
    code, job, err = sandbox.run([sandbox.programs.quern, "submit", source, "-o", sandbox.directory / "local-out", *JOB, "--detach", "--server",
                                  f"unix:{path}"])
    check(code == 1 and "what this coordinator may touch" in err or code == 0, f"{code} {err}")
    code, _, err = sandbox.run([sandbox.programs.quern, "cancel", "jobs/1", "--server", f"unix:{path}"])
    wait_for("the audit line", lambda: re.search(rf"audit event=call who=uid:{os.getuid()} from=\S+ method=CancelJob target=jobs/1",
                                                 log.read_text()))
    process.send_signal(signal.SIGTERM)
    check(process.wait(timeout=30) == 0, log.read_text())
    check(not path.exists(), "the socket was left")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="directory of the programs, or a build directory")
    parser.add_argument("--source", required=True, help="a small checkpoint")
    parser.add_argument("--only", help="run one part alone")
    arguments = parser.parse_args()
    programs = Programs(arguments.bin)
    source = Path(arguments.source).resolve()

    def run(part, *given):
        if arguments.only in (None, part.__name__):
            start = time.monotonic()
            part(*given)
            print(f"{part.__name__}: ok, {time.monotonic() - start:.1f} s", flush=True)

    with Sandbox(programs) as sandbox:
        run(start_is_refused, sandbox, source)
        run(local_users_are_named, sandbox, source)
    with Sandbox(programs) as sandbox:
        coordinator = Coordinator(sandbox, source, ["--stream-timeout", "2s", "--metrics-listen", "127.0.0.1:0"])
        for part in [strangers_are_refused, tokens_are_needed, a_worker_joins, paths_stay_below_the_roots, results_hold_nothing_else,
                     data_connections_need_tickets, races_do_not_lead_out, planted_links_lead_nowhere, messages_are_limited,
                     slow_clients_are_cut_off, secrets_are_reloaded, metrics_let_nobody_in]:
            run(part, coordinator)
        if arguments.only is None:
            all_of_it_is_logged(coordinator)
        log = coordinator.text()
        for role, token in coordinator.tokens.items():
            check(token not in log, f"the log holds the {role} token")
        check("the secret outside" not in log, "the log holds what lies outside")
        coordinator.check_memory("all of it")
        coordinator.stop()
    with Sandbox(programs) as sandbox:
        run(floods_are_bounded, sandbox, source)
    with Sandbox(programs) as sandbox:
        run(one_client_does_not_take_all, sandbox, source)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
