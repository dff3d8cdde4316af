"""The page of runs that go on."""

import http.client
import threading
import urllib.error
import urllib.request

import pytest

from fivefold.errors import ConfigurationError
from fivefold.report import page_server


@pytest.fixture
def serving():
    servers = []

    def start(paths):
        server = page_server(paths)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def read(address):
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 - our own server
        return answer.read().decode(), answer.headers


def test_the_page_follows_the_runs(make_run, tmp_path, serving):
    empty = tmp_path / "later"
    address = serving([empty])
    text, headers = read(address)
    assert "Waiting" in text
    assert headers["Refresh"] == "5"
    make_run(empty / "co2", "co2", finished=False)
    text, _ = read(address)
    assert "Not finished: CO2 (tau 8)" in text
    assert len(text) < 500_000


def test_only_the_page_is_served_and_only_here(comparison, serving):
    address = serving([comparison])
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        read(address + "../etc/passwd")
    refused.value.close()
    server = page_server([comparison])
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="cannot be listened on"):
        page_server([comparison], port=server.server_port)
    server.server_close()


def test_a_browser_that_leaves_is_no_error(comparison, serving, monkeypatch, capsys):
    def gone(_handler):
        raise ConnectionResetError

    monkeypatch.setattr("http.server.BaseHTTPRequestHandler.end_headers", gone)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        read(serving([comparison]))
    assert capsys.readouterr().err == ""
