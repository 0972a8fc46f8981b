"""The load client against servers that accept a connection and say nothing more."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvpolicy import SamplingParams, UserError
from kvpolicy.serving import remote
from kvpolicy.serving.client import Client
from kvpolicy.serving.remote import RemoteEngine


def test_a_server_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        message = f"^http://127.0.0.1:{port}: no answer in 0.2 s$"
        with pytest.raises(UserError, match=message):
            RemoteEngine(Client("127.0.0.1", port), Client("127.0.0.1", port))


class _Begins(BaseHTTPRequestHandler):
    """Names its model, shows no policy, and of a stream sends one token a quarter of a second, three
    times, then nothing."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "m"}]} if found else {}).encode()
        self.send_response(200 if found else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        choice = {"token_ids": [7], "text": "x", "finish_reason": None}
        event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        for _ in range(3):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            time.sleep(0.25)
        self.over.wait(30)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    _Begins.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Begins) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_port
        _Begins.over.set()
        server.shutdown()
        thread.join(10)


def test_a_stream_that_stops_is_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts from the last event: the three tokens take longer than the limit less one gap."""
    monkeypatch.setattr(remote, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(remote, "BACK_OFF", 0.0)
    engine = RemoteEngine(Client("127.0.0.1", port), Client("127.0.0.1", port))
    try:
        handle = engine.submit(b"x", SamplingParams(max_new_tokens=9))
        until = time.monotonic() + 20
        while engine.step() and time.monotonic() < until:
            pass
        assert handle.done and handle.reason == "error" and handle.tokens == [7, 7, 7]
        assert engine.errors == {"nothing for 0.6 s": 1}
        assert time.perf_counter() - handle.arrived > 1.0  # 0.5 s of tokens, then 0.6 s of none
    finally:
        engine.close()
