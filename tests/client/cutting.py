"""A connection that breaks off where a test wants it to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import httpx


class Cutting:
    """A proxy that passes on connections and cuts some of them short."""

    def __init__(self, target: str) -> None:
        self._target = httpx.URL(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cut_after_bytes: list[int] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            limit = self.cut_after_bytes.pop(0) if self.cut_after_bytes else None
            outer = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [inner, outer]
            threading.Thread(target=self._pass, args=(inner, outer, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(outer, inner, limit), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        try:
            while piece := source.recv(65536):
                if limit is not None:
                    piece = piece[:limit]
                    limit -= len(piece)
                sink.sendall(piece)
                if limit == 0:
                    break
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # A thread that waits for connections is woken by the end of its socket, not by its closing.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for one in (self._listener, *self._sockets):
            one.close()
