"""A TCP proxy whose connections the test can delay, stall and reset."""

import asyncio
import contextlib
import socket
import struct
import threading


class Proxy:
    """Listens on `address` (any port) and forwards to what connect() makes: a connected, non-blocking socket. Runs on a thread of its own."""

    CHUNK = 64 << 10

    def __init__(self, address, connect):
        self._connect = connect
        self.delay = 0.0  # seconds, each way
        self._stalled = False
        self._pairs = set()
        self._tasks = set()  # the loop holds them weakly
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server((address, 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._open = asyncio.Event()
        self._open.set()
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = {accepting, *self._tasks}
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self):
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            serving = self._loop.create_task(self._serve(client))
            self._tasks.add(serving)
            serving.add_done_callback(self._tasks.discard)

    async def _serve(self, client):
        try:
            server = await self._loop.run_in_executor(None, self._connect)
        except OSError:
            client.close()
            return
        pair = (client, server)
        self._pairs.add(pair)
        directions = [self._loop.create_task(self._forward(*way)) for way in (pair, (server, client))]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        self._pairs.discard(pair)
        for end in pair:
            end.close()

    async def _forward(self, source, sink):
        try:
            while data := await self._loop.sock_recv(source, self.CHUNK):
                if self.delay > 0:
                    await asyncio.sleep(self.delay)
                await self._open.wait()
                await self._loop.sock_sendall(sink, data)
        except OSError:
            pass

    def stall(self, stalled):
        """Whether bytes stay where they are; connections are accepted all the same."""
        self._loop.call_soon_threadsafe(self._open.clear if stalled else self._open.set)

    def reset(self):
        """Ends all connections at once, with what is under way."""
        def close():
            for pair in list(self._pairs):
                for end in pair:
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        end.shutdown(socket.SHUT_RDWR)
        self._loop.call_soon_threadsafe(close)

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                end.close()
