"""``fivefold elastic lighthouse`` as a person runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("torchft", reason="torchft is not installed (fivefold[elastic])")


def start(*options):
    command = [sys.executable, "-m", "fivefold", "elastic", "lighthouse", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.alone
@pytest.mark.distributed
def test_the_lighthouse_shows_a_page_and_ends_on_sigterm():
    process = start("--bind", "127.0.0.1:0", "--min-workers", "3")
    try:
        line = json.loads(process.stdout.readline())
        assert line["min_workers"] == 3
        url = f"http://127.0.0.1:{line['port']}/status"
        with urllib.request.urlopen(url, timeout=10) as page:
            assert page.status == 200
        process.send_signal(signal.SIGTERM)
        ended_s = time.monotonic()
        assert process.wait(10) == 0
        assert time.monotonic() - ended_s < 5
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.alone
@pytest.mark.distributed
def test_a_taken_port_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--bind", f"127.0.0.1:{taken.getsockname()[1]}")
        out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert "cannot listen on 127.0.0.1" in error
    assert os.linesep + "hint: choose another port with --bind" in error


@pytest.mark.parametrize("bind", ["http://127.0.0.1:0", "127.0.0.1:0/"])
def test_an_address_may_be_written_as_a_url(bind):
    from fivefold.optim import start_lighthouse

    lighthouse = start_lighthouse(bind)
    try:
        url = f"http://127.0.0.1:{lighthouse.port}/status"
        with urllib.request.urlopen(url, timeout=10) as page:
            assert page.status == 200
    finally:
        lighthouse.close()


def test_a_worker_at_an_address_of_another_machine_is_told():
    from fivefold.errors import CommunicationError
    from fivefold.optim import elastic_transport, start_lighthouse

    lighthouse = start_lighthouse("127.0.0.1:0")
    try:
        with pytest.raises(CommunicationError, match=r"cannot listen on 192\.0\.2\.1") as caught:
            elastic_transport(lighthouse=f"127.0.0.1:{lighthouse.port}", host="192.0.2.1")
    finally:
        lighthouse.close()
    assert caught.value.hint == "give an address of this machine"


@pytest.mark.parametrize("bind", ["nowhere", "0.0.0.0:", "127.0.0.1:65536"])
def test_a_bad_address_is_said(bind):
    from fivefold.errors import ConfigurationError
    from fivefold.optim import start_lighthouse

    with pytest.raises(ConfigurationError, match="must be host:port"):
        start_lighthouse(bind)
    with pytest.raises(ConfigurationError, match="join_timeout_s must be"):
        start_lighthouse("127.0.0.1:0", join_timeout_s=0)
