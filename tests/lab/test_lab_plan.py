from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.lab import LabSpec
from fivefold.lab._plan import Step, lab_facts, plan_bridge, plan_relay, rank_environment


def _lines(steps: list[Step]) -> list[str]:
    return [f"{step.namespace}: {' '.join(step.argv)}" for step in steps]


def test_two_hosts_with_a_rate() -> None:
    tbf = "tbf rate 200000000bit burst 66000b latency 50000us"
    assert _lines(plan_bridge(LabSpec(hosts=2, rate="200Mbit/s"))) == [
        "switch: ip link add br0 type bridge",
        "switch: ip link set br0 up",
        "switch: ip link add port0 type veth peer name eth0 netns @host0",
        "switch: ip link set port0 mtu 1500 master br0 up",
        "host0: ip link set lo up",
        "host0: ip addr add 10.77.0.1/24 dev eth0",
        "host0: ip link set eth0 mtu 1500 up",
        f"host0: tc qdisc add dev eth0 root {tbf}",
        f"switch: tc qdisc add dev port0 root {tbf}",
        "switch: ip link add port1 type veth peer name eth0 netns @host1",
        "switch: ip link set port1 mtu 1500 master br0 up",
        "host1: ip link set lo up",
        "host1: ip addr add 10.77.0.2/24 dev eth0",
        "host1: ip link set eth0 mtu 1500 up",
        f"host1: tc qdisc add dev eth0 root {tbf}",
        f"switch: tc qdisc add dev port1 root {tbf}",
    ]


def test_netem_delays_on_the_uplink_before_the_rate() -> None:
    spec = LabSpec(hosts=1, rate="1Gbit/s", delay="10ms", jitter="1ms", loss=0.001)
    tbf = "tbf rate 1000000000bit burst 125000b latency 50000us"
    # 125 MB/s for 11 ms are 917 packets of 1500 bytes; the limit has room for twice as many.
    netem = "netem limit 1833 delay 10000us 1000us loss 0.1%"
    assert _lines(plan_bridge(spec, netem=True))[-4:] == [
        "host0: ip link set eth0 gso_max_segs 1",
        f"host0: tc qdisc add dev eth0 root handle 1: {netem}",
        f"host0: tc qdisc add dev eth0 parent 1:1 {tbf}",
        f"switch: tc qdisc add dev port0 root {tbf}",
    ]


def test_netem_without_a_rate_stands_alone() -> None:
    lines = _lines(plan_bridge(LabSpec(hosts=1, delay="1ms"), netem=True))
    assert [line for line in lines if "tc qdisc" in line] == [
        "host0: tc qdisc add dev eth0 root handle 1: netem limit 16667 delay 1000us"
    ]


def test_no_rate_means_no_queueing_discipline() -> None:
    assert not any(step.argv[0] == "tc" for step in plan_bridge(LabSpec(hosts=3)))


def test_relay_packets_grow_with_the_rate() -> None:
    assert _lines(plan_relay(LabSpec(hosts=1, rate="200Mbit/s", delay="5ms"))) == [
        "host0: ip link set lo up",
        "host0: ip addr add 10.77.0.1/24 dev eth0",
        "host0: ip link set eth0 mtu 10000 txqueuelen 1000 up",
    ]


@given(
    rate=st.floats(1e3, 1e11),
    queue_s=st.floats(1e-4, 1.0),
    mtu=st.one_of(st.none(), st.integers(576, 65000)),
)
def test_tbf_always_admits_a_frame(rate: float, queue_s: float, mtu: int | None) -> None:
    step = plan_bridge(LabSpec(hosts=1, rate=rate, queue=queue_s, mtu=mtu))[-1]
    match = re.fullmatch(r"tbf rate (\d+)bit burst (\d+)b latency (\d+)us", " ".join(step.argv[6:]))
    assert match is not None
    bits_per_s, burst_bytes, latency_us = map(int, match.groups())
    frame_bytes = (mtu or 1500) + 14
    assert bits_per_s == pytest.approx(rate * 8, abs=1)
    assert burst_bytes >= 2 * frame_bytes
    assert burst_bytes >= rate * 0.001 - 1
    assert latency_us * 1e-6 * rate >= 9 * frame_bytes
    assert latency_us >= queue_s * 1e6 - 1


def test_ranks_are_numbered_host_by_host_as_torchrun_does() -> None:
    spec = LabSpec(hosts=2, nproc_per_host=2, rate="8Mbit/s", host_rates={1: 5e6})
    base = {"PATH": "/bin", "RANK": "9", "OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "x"}
    env = rank_environment(2, spec, lab_facts(spec, "tbf"), base=base)
    lab = json.loads(env.pop("FIVEFOLD_LAB"))
    assert env == {
        "PATH": "/bin",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
    }
    assert lab == {
        "hosts": 2,
        "nproc_per_host": 2,
        "rate_bytes_per_s": 1e6,
        "host_rates_bytes_per_s": {"1": 5e6},
        "delay_s": 0.0,
        "jitter_s": 0.0,
        "loss": 0.0,
        "shaped": True,
        "means": "tbf",
        "reason": None,
        "mtu": None,
        "topology": None,
        "classes": 1,
        "host_classes": {},
        "aggregation": {},
    }
