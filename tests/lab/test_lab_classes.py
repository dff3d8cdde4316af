"""Priority classes on the lab's links: how they are planned, refused, and what they do."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.lab import LabSpec, class_tos, probe_capabilities, run_lab
from fivefold.lab._plan import plan_bridge, shape_link
from fivefold.lab._run import choose_means
from fivefold.lab.capabilities import Capabilities
from fivefold.network.topology import switch


@given(
    classes=st.integers(2, 8),
    rate=st.floats(1e4, 1e10),
    mtu=st.sampled_from([None, 9000, 60000]),
)
def test_classes_share_the_rate_and_no_more(classes, rate, mtu):
    spec = LabSpec(hosts=1, rate=rate, classes=classes, mtu=mtu)
    lines = shape_link(spec, rate, namespace="host0", device="eth0").lines
    leaves = [
        tuple(map(int, found))
        for line in lines
        for found in re.findall(r"parent 8:1 .* rate (\d+)bit ceil (\d+)bit prio (\d+)", line)
    ]
    assert [priority for *_, priority in leaves] == list(range(classes))
    assert {ceil for _, ceil, _ in leaves} == {round(rate * 8)}
    assert sum(own for own, *_ in leaves) == round(rate * 8)
    # Strict but for a hundredth each, so that nobody waits for ever.
    assert all(abs(own - rate * 0.08) <= 1 for own, *_ in leaves[1:])
    queues = [line.split()[5] for line in lines if " bfifo " in line]
    assert queues == [f"8:{16 + priority:x}" for priority in range(classes)]


def _class_of(lines, packet):
    """What the filters do to a packet, read back from their words: the first in order that fits."""
    filters = []
    for line in lines:
        if line.startswith("filter"):
            order, conditions, leaf = re.fullmatch(
                r".* prio (\d+) u32 (.*) flowid (\S+)", line
            ).groups()
            filters.append(
                (int(order), re.findall(r"match ip (\w+) (\S+)(?: (0x\w+))?", conditions), leaf)
            )
    for _, conditions, leaf in sorted(filters, key=lambda entry: entry[0]):
        fits = []
        for field, value, mask in conditions:
            if field == "dsfield":
                fits.append(packet["tos"] & int(mask, 16) == int(value, 16))
            else:
                prefix = value.split("/")[0] if value.endswith("/32") else "10.79."
                fits.append(packet[field].startswith(prefix))
        if all(fits):
            return int(leaf.partition(":")[2], 16) - 16
    default = re.search(r"default (\w+)", lines[0]).group(1)
    return int(default, 16) - 16


def test_a_packet_goes_by_its_mark_then_its_host_then_last():
    spec = LabSpec(
        hosts=3, rate=1e6, classes=3, host_classes={0: 0, 1: 1}, aggregators={"switch": {}}
    )
    lines = shape_link(spec, 1e6, namespace="host0", device="eth0").lines

    def found(source, target, tos=0):
        return _class_of(lines, {"src": source, "dst": target, "tos": tos})

    hosts = [f"10.77.0.{host + 1}" for host in range(3)]
    assert [found(host, "10.77.0.3") for host in hosts] == [0, 1, 2]
    assert found(hosts[1], hosts[0]) == 1, "the sender counts, not who it sends to"
    assert [found("10.79.0.1", host) for host in hosts] == [0, 1, 2]
    for priority in range(2):
        assert found(hosts[2], hosts[0], tos=class_tos(priority, 3)) == priority
    assert found(hosts[2], hosts[0], tos=0x02) == 2, "the bits of ECN are not a class"


@pytest.mark.parametrize(("priority", "classes"), [(3, 3), (-1, 2), (0, 9), (0, 0)])
def test_there_are_eight_classes_at_most(priority, classes):
    with pytest.raises(ConfigurationError, match="1 to 8 classes"):
        class_tos(priority, classes)


def test_one_class_is_the_plain_queue_and_two_keep_the_order_of_steps():
    plain = plan_bridge(LabSpec(hosts=2, rate="8Mbit/s"))
    classed = plan_bridge(LabSpec(hosts=2, rate="8Mbit/s", classes=2))
    assert [step.namespace for step in plain] == [step.namespace for step in classed]
    assert not any(step.lines for step in plain)
    assert {step.argv for step in classed if step.lines} == {("tc", "-batch", "-")}


def test_netem_keeps_its_place_above_the_classes():
    spec = LabSpec(hosts=1, rate="8Mbit/s", delay="1ms", classes=2)
    (step,) = (s for s in plan_bridge(spec, netem=True) if s.namespace == "host0" and s.lines)
    assert step.lines[0].startswith("qdisc add dev eth0 parent 1:1 handle 8: htb")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": 9}, "classes must be a whole number from 1 to 8"),
        ({"classes": 2}, "host 0's has none, and classes is 2"),
        ({"rate": 1e6, "classes": 2, "host_classes": {0: 2}}, "class of host 0 must be"),
        ({"rate": 1e6, "classes": 2, "host_classes": {5: 1}}, "names host 5"),
    ],
)
def test_what_is_no_class(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        LabSpec(hosts=2, **fields)


def test_classes_and_switches_are_named():
    spec = LabSpec.of_topology(
        switch(3, bandwidth=1e6),
        classes=4,
        host_classes={0: 3, 2: 0},
        aggregators={"switch0": {"slots": 4}},
    )
    assert spec.describe() == "3 hosts on switch:3, 4 classes, aggregation in switch0"


def _without(name):
    able = probe_capabilities()
    items = tuple(
        replace(item, works=item.name != name, reason="tried", fix=f"load {name}")
        for item in able.items
    )
    return Capabilities("root", items)


@pytest.mark.parametrize("name", ["htb", "u32"])
def test_a_kernel_without_classes_says_what_is_missing(monkeypatch, name):
    monkeypatch.setattr("fivefold.lab._run.probe_capabilities", lambda: _without(name))
    with pytest.raises(UnsupportedError, match=f"{name}: tried") as caught:
        choose_means(LabSpec(rate="8Mbit/s", classes=2), allow_unshaped=False)
    assert f"load {name}" in str(caught.value.hint)
    assert choose_means(LabSpec(rate="8Mbit/s"), allow_unshaped=False)[0] == "tbf"


def test_the_means_name_the_queue(monkeypatch):
    monkeypatch.setattr("fivefold.lab._run.probe_capabilities", lambda: _without("none of them"))
    for fields, means in (({}, "htb"), ({"delay": "1ms"}, "htb+netem")):
        spec = LabSpec(rate="8Mbit/s", classes=2, **fields)
        assert choose_means(spec, allow_unshaped=False) == (means, None)


def test_the_relay_has_no_classes(monkeypatch):
    monkeypatch.setattr("fivefold.lab._run.probe_capabilities", lambda: _without("netem"))
    spec = LabSpec(rate="8Mbit/s", delay="1ms", classes=2)
    with pytest.raises(UnsupportedError, match="the relay here, which has no classes"):
        choose_means(spec, allow_unshaped=False)


_CONTENTION = """
import os, socket, sys, threading, time
from fivefold.lab import class_tos
rank, marks, got = int(os.environ["RANK"]), sys.argv[1] == "marks", {0: [], 1: []}

def receive(server, number):
    with server, server.accept()[0] as peer:
        while data := peer.recv(1 << 16):
            got[number].append((time.monotonic(), len(data)))

def send(number, tos):
    while True:
        try:
            peer = socket.create_connection(("host2", 5000 + number))
            break
        except OSError:
            time.sleep(0.02)
    with peer:
        peer.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        time.sleep(0.6 * (number == 0))
        end = time.monotonic() + (1.2 if number == 0 else 2.4)
        while time.monotonic() < end:
            peer.sendall(bytes(1 << 14))

if rank == 2:
    threads = [
        threading.Thread(
            target=receive, args=(socket.create_server(("0.0.0.0", 5000 + number)), number)
        )
        for number in (0, 1)
    ]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    begin, end = got[0][0][0] + 0.3, got[0][0][0] + 1.1
    for number in (0, 1):
        print(sum(size for at, size in got[number] if begin <= at < end) / (end - begin))
    print(sum(size for at, size in got[1] if at < begin - 0.3) > 0)
elif marks and rank == 0:
    threads = [threading.Thread(target=send, args=(n, class_tos(n + 1, 3))) for n in (0, 1)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
elif not marks:
    send(rank, 0)
"""


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("classes_work")
@pytest.mark.parametrize("how", ["hosts", "marks"])
def test_the_more_urgent_class_gets_the_link(tmp_path, how):
    """4 MB/s to host 2; the less urgent stream has been there for a while when the other begins."""
    own = {"host_classes": {0: 0, 1: 1}} if how == "hosts" else {}
    spec = LabSpec.of_topology(switch(3, bandwidth=4e6), classes=3, mtu=9000, **own)
    command = [sys.executable, "-c", textwrap.dedent(_CONTENTION), how]
    result = run_lab(spec, command, timeout_s=60, stream=False, log_folder=tmp_path / "l").check()
    high, low, was_there = result.ranks[2].stdout().split()
    assert was_there == "True"
    assert 2.8e6 < float(high) < 4.2e6
    assert float(low) < 0.15 * float(high)
