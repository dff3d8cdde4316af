from __future__ import annotations

import pickle
from types import MappingProxyType

import pytest

from fivefold.errors import ConfigurationError
from fivefold.lab import LabSpec


def test_quantities_become_seconds_and_bytes() -> None:
    spec = LabSpec(hosts=3, rate="1 Gbit/s", delay="2ms", jitter="500us", nproc_per_host=4)
    assert spec.rate_bytes_per_s == 125e6
    assert spec.delay_s == pytest.approx(0.002)
    assert spec.jitter_s == pytest.approx(0.0005)
    assert spec.world_size == 12


def test_a_host_may_have_its_own_rate() -> None:
    spec = LabSpec(hosts=3, rate="80Mbit/s", host_rates={1: "8Mbit/s"})
    assert [spec.rate_of(host) for host in range(3)] == [10e6, 1e6, 10e6]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": 0}, "hosts must be a whole number from 1 to 253; got 0"),
        ({"hosts": 254}, "got 254"),
        ({"hosts": 2.5}, "got 2.5"),
        ({"hosts": True}, "got True"),
        ({"nproc_per_host": 0}, "nproc_per_host must be a whole number from 1"),
        ({"rate": "0Mbit/s"}, "rate must be at least 8 kbit/s; got 0 bit/s"),
        ({"rate": "fast"}, "'fast' is not a rate; write a number with its unit"),
        ({"rate": "200Mbit"}, "'200Mbit' is not a rate"),
        ({"delay": "5 parsec"}, "'5 parsec' is not a duration"),
        ({"delay": "-1ms"}, "'-1ms' is not a duration"),
        ({"loss": 1.0}, "loss must be a probability in [0, 1); got 1"),
        ({"loss": -0.1}, "got -0.1"),
        ({"loss": float("nan")}, "got nan"),
        ({"delay": "1ms", "jitter": "2ms"}, "jitter must be at most the delay"),
        ({"queue": "0s"}, "queue must be more than zero"),
        ({"mtu": 100}, "mtu must be a whole number from 576 to 65,000"),
        ({"host_rates": {2: "1Mbit/s"}}, "host_rates names host 2, but there are 2 hosts"),
        ({"host_rates": {0: "1bit/s"}}, "rate must be at least 8 kbit/s"),
    ],
)
def test_bad_values_say_what_is_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LabSpec(**fields)
    assert message in str(caught.value)


def test_one_line_says_what_it_is() -> None:
    spec = LabSpec(
        hosts=2, nproc_per_host=2, rate="1Gbit/s", delay="5ms", jitter="1ms", host_rates={1: 1e6}
    )
    expected = "2 hosts, 2 processes each, 1 Gbit/s, host1 8 Mbit/s, 5 ms ± 1 ms one way"
    assert spec.describe() == expected
    assert LabSpec(hosts=1).describe() == "1 host, no rate limit"


def test_any_mapping_can_be_sent_to_the_supervisor() -> None:
    fields = {
        "host_rates": {1: "8Mbit/s"},
        "host_classes": {0: 1},
        "aggregators": {"switch": MappingProxyType({"slots": 4})},
        "routes": {},
    }
    views = {name: MappingProxyType(field) for name, field in fields.items()}
    spec = LabSpec(rate="80Mbit/s", classes=2, **views)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - our own
    assert spec.aggregators == {"switch": {"slots": 4}}
