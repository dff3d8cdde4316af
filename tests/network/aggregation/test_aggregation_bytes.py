"""Whatever bytes one peer sends, the switch goes on, and another job gets its right sums."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import time

import numpy as np
import pytest
from hypothesis import settings

from fivefold.network.aggregation import AggregationClient, AggregationOptions, read_switch_state
from fivefold.network.aggregation.wire import parse_address
from helpers.switch_process import SwitchProcess

pytestmark = pytest.mark.distributed

SLOT = 1024
HEADER = struct.Struct("!4sBBHIQQI")
JOIN, WELCOME, DATA, STATE = 1, 2, 4, 8
GOOD = {"job": "a", "rank": 0, "size": 2, "window": 4, "sequence": 0}


def frame(payload, kind=JOIN, dtype=0, chunk=0, sequence=1, total=8, length=None):
    said = len(payload) if length is None else length
    return HEADER.pack(b"5agg", kind, dtype, 0, chunk, sequence, total, said) + payload


def join(**changes):
    return frame(json.dumps(GOOD | changes).encode())


KNOWN = {
    "infinite rank": frame(b'{"job": "a", "rank": Infinity, "size": 2, "window": 4}'),
    "deep": frame(b"[" * 60_000),
    "deep with keys": frame(b'{"a":' * 12_000),
    "not a number": join(rank=float("nan")),
    "huge size": join(size=10**12) + frame(b"\0" * 8, DATA),
    "many ranks": join(size=65_000) + frame(b"\0" * 8, DATA),
    "huge sequence": join(sequence=10**30),
    "long number": frame(b'{"job": "a", "rank": ' + b"9" * 5_000 + b"}"),
    "list": frame(b"[]"),
    "null": frame(b"null"),
    "not text": frame(b"\xff\xfe\xfd"),
    "nested job": join(job=[[[]]]),
    "long job": join(job="j" * 60_000),
    "data before joining": frame(b"\0" * 8, DATA),
    "odd data": join(size=1) + frame(b"\0" * 7, DATA),
    "no data": join(size=1) + frame(b"", DATA),
    "no such type": join(size=1) + frame(b"\0" * 8, DATA, dtype=77),
    "too long": join(size=1) + frame(b"", DATA, length=1 << 31),
    "the switch's own": frame(b"{}", WELCOME),
    "joined twice": join() + join(),
    "largest numbers": join(size=1)
    + frame(b"\0" * 8, DATA, chunk=2**32 - 1, sequence=2**64 - 1, total=2**64 - 1),
    "cut short": join()[:20],
}


class Alone:
    """The hosts of a job of one process that plays all ranks: nobody to ask."""

    def minimum(self, flags):
        return flags

    def sum(self, values, dtype):
        raise AssertionError((values.size, dtype))  # the switch should have summed it


class Healthy:
    """A job of two ranks by hand: the client's frames, and sums that must be right."""

    def __init__(self, address):
        self._peers = [socket.create_connection(parse_address(address)) for _ in range(2)]
        self._sequence = 0
        for rank, peer in enumerate(self._peers):
            peer.settimeout(20)
            peer.sendall(join(job="healthy".ljust(256, "!"), rank=rank))  # the longest name
            assert self._read(peer)[0] == WELCOME

    def _read(self, peer):
        header = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
        return header[1], peer.recv(header[-1], socket.MSG_WAITALL) if header[-1] else b""

    def sum_and_check(self):
        self._sequence += 1
        parts = [np.arange(64, dtype=np.float32) * (rank + self._sequence) for rank in range(2)]
        for part, peer in zip(parts, self._peers, strict=True):
            data = part.tobytes()
            peer.sendall(frame(data, DATA, sequence=self._sequence, total=len(data)))
        for peer in self._peers:
            kind, data = self._read(peer)
            assert kind == 5, data
            assert np.array_equal(np.frombuffer(data, np.float32), parts[0] + parts[1])

    def close(self):
        for peer in self._peers:
            peer.close()


def attack(address, data, *, stays=False):
    """Send bytes and leave, in the middle or after the switch has answered."""
    with socket.create_connection(parse_address(address)) as peer:
        peer.settimeout(0.05)
        with contextlib.suppress(OSError):
            peer.sendall(data)
            while stays and peer.recv(1 << 16):
                pass


@pytest.mark.parametrize("sharing", ["dynamic", "reserved"])
def test_malformed_frames_end_nobody_elses_job(sharing):
    with SwitchProcess(slots=16, slot_bytes=SLOT, sharing=sharing) as switch:
        healthy = Healthy(switch.address)
        for data in KNOWN.values():
            for stays in (True, False):
                attack(switch.address, data, stays=stays)
                healthy.sum_and_check()
        healthy.close()
        for _ in range(50):
            if read_switch_state(switch.address).jobs == 0:
                break
            time.sleep(0.1)
        state = switch.stop()
    assert (state.jobs, state.slots_free) == (0, 16)


def random_bytes(choice):
    """Frames of all sorts, some of them damaged, in any order."""
    numbers = (0, 1, 2, -1, 7, 2**31, 2**63, 2**64, 1e300, None, "3", True, [], {})
    parts = []
    for _ in range(choice.randint(1, 5)):
        kind = choice.choice((JOIN, JOIN, DATA, STATE, choice.randrange(256)))
        if kind == JOIN:
            said = GOOD | {"job": choice.choice(("a", "b", "", 3, None))}
            for name in choice.sample(sorted(GOOD), choice.randint(0, 3)):
                said[name] = choice.choice(numbers)
            data = bytearray(frame(json.dumps(said).encode()))
        else:
            payload = choice.randbytes(choice.choice((0, 1, 8, 64, SLOT, SLOT + 1)))
            fields = {
                "dtype": choice.choice((0, 1, 5, 255)),
                "chunk": choice.choice((0, 1, 2**32 - 1)),
                "sequence": choice.choice((0, 1, 2, 2**64 - 1)),
                "total": choice.choice((0, 8, 2**64 - 1)),
                "length": choice.choice((None, None, 0, 2**32 - 1)),
            }
            data = bytearray(frame(payload, kind, **fields))
        if choice.random() < 0.4:
            data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        parts.append(bytes(data))
    whole = b"".join(parts) if choice.random() < 0.9 else choice.randbytes(300)
    return whole[: choice.randint(0, len(whole))] if choice.random() < 0.4 else whole


def test_random_bytes_end_nobody_elses_job():
    profile = settings()
    seed = 0 if profile.derandomize else random.randrange(1 << 30)  # noqa: S311 - no secret
    with SwitchProcess(slots=16, slot_bytes=SLOT) as switch:
        healthy = Healthy(switch.address)
        for case in range(profile.max_examples):
            choice = random.Random(f"{seed} {case}")  # noqa: S311 - no secret
            attack(switch.address, random_bytes(choice), stays=case % 4 == 0)
            try:
                healthy.sum_and_check()
            except (OSError, struct.error) as error:
                raise AssertionError((seed, case)) from error
        healthy.close()
        switch.stop()


def test_ranks_that_call_different_sums_are_told():
    """A label tells collectives apart that look alike to the switch."""

    class Other(Alone):
        def minimum(self, flags):
            return np.minimum(flags, 1)  # another rank's label has smaller bytes

    from fivefold.errors import CommunicationError

    client = AggregationClient(
        "127.0.0.1:9",
        job="a",
        rank=0,
        size=2,
        fallback=Other(),
        options=AggregationOptions(connect_timeout_s=0.2),
    )
    with pytest.raises(CommunicationError, match="the ranks called different collectives"):
        client.all_reduce(np.ones(8, np.float32), label=77)
