"""As much of HTTP/2 and gRPC as an attacker needs: frames by hand, so that they can be wrong, huge, or never end."""

import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _integer(value, bits):
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    encoded = bytes([most])
    value -= most
    while value >= 128:
        encoded += bytes([value % 128 + 128])
        value //= 128
    return encoded + bytes([value])


def header_block(headers):
    """Literals without indexing."""
    block = b""
    for name, value in headers:
        name, value = name.encode(), value.encode()
        block += b"\0" + _integer(len(name), 7) + name + _integer(len(value), 7) + value
    return block


def grpc_headers(method, token=None, more=()):
    headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"), ("te", "trailers"),
               ("content-type", "application/grpc")]
    if token is not None:
        headers.append(("authorization", f"Bearer {token}"))
    return [*headers, *more]


def grpc_message(block):
    """The value of grpc-message among undecoded headers, which gRPC writes as literals."""
    name = b"grpc-message"
    start = block.index(name) + len(name)
    size, start = block[start] & 0x7F, start + 1
    if size == 0x7F:
        shift = 0
        while True:
            size += (block[start] & 0x7F) << shift
            shift, start = shift + 7, start + 1
            if block[start - 1] < 0x80:
                break
    return block[start:start + size]


def message(payload, compressed=False):
    return struct.pack(">BI", compressed, len(payload)) + payload


class Connection:
    """Sends what it is told, and takes note of what comes. Windows are opened only when asked for."""

    def __init__(self, sock, seconds=30):
        self.socket = sock
        self.socket.settimeout(seconds)
        self.sent_window = 65535  # of the connection, as the server has opened it
        self.stream_windows = {}
        self.initial_window = 65535
        self.text = {}  # stream -> what its headers say, undecoded
        self.ended = set()
        self.data = {}  # stream -> how many bytes have come
        self.body = {}  # stream -> the first of them
        self._read = b""

    def start(self):
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        return self

    def call(self, stream, headers, end_headers=True):
        self.socket.sendall(frame(HEADERS, END_HEADERS if end_headers else 0, stream, header_block(headers)))

    def next_frame(self):
        """(kind, flags, stream, payload), or None when the server has closed."""
        while len(self._read) < 9 or len(self._read) < 9 + int.from_bytes(self._read[:3], "big"):
            try:
                block = self.socket.recv(65536)
            except (ConnectionError, socket.timeout) as error:
                if isinstance(error, socket.timeout):
                    raise
                return None
            if not block:
                return None
            self._read += block
        size = int.from_bytes(self._read[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", self._read[3:9])
        payload = self._read[9:9 + size]
        self._read = self._read[9 + size:]
        return kind, flags, stream & 0x7FFFFFFF, payload

    def handle(self, received):
        kind, flags, stream, payload = received
        if kind == SETTINGS and not flags & ACK:
            for i in range(0, len(payload), 6):
                key, value = struct.unpack(">HI", payload[i:i + 6])
                if key == 4:
                    self.initial_window = value
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">I", payload)[0]
            if stream == 0:
                self.sent_window += more
            else:
                self.stream_windows[stream] = self.stream_windows.get(stream, 0) + more
        elif kind in (HEADERS, CONTINUATION):
            self.text[stream] = self.text.get(stream, b"") + payload
        elif kind == DATA:
            self.data[stream] = self.data.get(stream, 0) + len(payload)
            self.body[stream] = (self.body.get(stream, b"") + payload)[:1024]
        if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)

    def until_ended(self, stream, seconds=60):
        """True when the server has ended the stream, False when it has closed the connection."""
        end = time.monotonic() + seconds
        while stream not in self.ended:
            if time.monotonic() > end:
                raise TimeoutError(f"stream {stream} did not end within {seconds} s")
            received = self.next_frame()
            if received is None:
                return False
            self.handle(received)
        return True

    def send(self, stream, payload, seconds=60):
        """As DATA, within the windows that the server opens. False when it ends the stream or the connection before all is sent."""
        end = time.monotonic() + seconds
        sent = 0
        try:
            while sent < len(payload):
                window = min(self.sent_window, self.initial_window + self.stream_windows.get(stream, 0), 16384)
                if window > 0:
                    block = payload[sent:sent + window]
                    self.socket.sendall(frame(DATA, 0, stream, block))
                    sent += len(block)
                    self.sent_window -= len(block)
                    self.stream_windows[stream] = self.stream_windows.get(stream, 0) - len(block)
                    continue
                if time.monotonic() > end:
                    raise TimeoutError(f"after {sent} bytes of stream {stream} nothing moves")
                received = self.next_frame()
                if received is None:
                    return False
                self.handle(received)
                if stream in self.ended:
                    return False
        except ConnectionError:
            return False
        return True
