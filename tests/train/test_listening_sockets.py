"""No command listens where other machines reach it, unless it was asked to."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request

import pytest

from fivefold.errors import ConfigurationError
from fivefold.network.aggregation import AggregationSwitch
from fivefold.optim import elastic_transport, start_lighthouse
from helpers.listening import addresses_while_it_runs, is_loopback, listeners

pytestmark = [pytest.mark.alone, pytest.mark.distributed]
_HEAR = (
    "import socket, time; s = socket.create_server(('0.0.0.0', 5000)); print('here', flush=True); "
    "time.sleep(1)"
)


def watched(*arguments, until_first=False):
    """All addresses at which a command and its children listened, and what it printed."""
    command = [sys.executable, "-m", "fivefold", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        found = addresses_while_it_runs(process, until_first=until_first)
    finally:
        process.terminate()
        output = process.communicate(timeout=60)[0]
    return found, output


def test_the_lighthouse_by_default():
    pytest.importorskip("torchft")
    found, output = watched("elastic", "lighthouse", until_first=True)
    assert found == {"127.0.0.1"}, output


def test_the_lab_outside_its_namespaces():
    found, output = watched("lab", "run", "--hosts", "2", "--", sys.executable, "-c", _HEAR)
    assert "here" in output
    assert all(map(is_loopback, found)), found


def test_an_elastic_worker():
    pytest.importorskip("torchft")
    lighthouse = start_lighthouse("127.0.0.1:0", min_workers=1)
    before = listeners([os.getpid()])
    transport = elastic_transport(lighthouse=f"127.0.0.1:{lighthouse.port}", quorum_timeout_s=20)
    try:
        transport._services._beat()  # as its first vote does
        after = listeners([os.getpid()])
    finally:
        transport.close()
        lighthouse.close()
    assert before == {"127.0.0.1"}
    assert after
    assert all(map(is_loopback, after)), after


def test_the_aggregation_switch_by_default():
    with AggregationSwitch(slots=1) as switch:
        assert switch.address.startswith("127.0.0.1:")


def test_a_lighthouse_for_others_asks_who():
    with pytest.raises(ConfigurationError, match="no host is allowed to connect"):
        start_lighthouse("0.0.0.0:0")
    with pytest.raises(ConfigurationError, match=r"addresses and networks; got '10\.0\.0/8x'"):
        start_lighthouse("0.0.0.0:0", allow=["10.0.0/8x"])


@pytest.mark.parametrize(
    ("allow", "admitted"),
    [(["127.0.0.0/8"], True), (["localhost"], True), (["10.0.0.0/8", "192.0.2.1"], False)],
    ids=["network", "name", "others"],
)
def test_only_allowed_hosts_reach_a_lighthouse_for_others(allow, admitted):
    pytest.importorskip("torchft")
    lighthouse = start_lighthouse("0.0.0.0:0", allow=allow)
    try:
        url = f"http://127.0.0.1:{lighthouse.port}/status"
        if admitted:
            with urllib.request.urlopen(url, timeout=10) as page:
                assert page.status == 200
            # A worker votes through it as well.
            transport = elastic_transport(lighthouse=url.removesuffix("/status"))
            transport.close()
        else:
            with socket.create_connection(("127.0.0.1", lighthouse.port), timeout=10) as peer:
                peer.sendall(b"GET /status HTTP/1.0\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(100) == b""
    finally:
        lighthouse.close()
