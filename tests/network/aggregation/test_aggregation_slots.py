"""Sums, slots and frames, without sockets between processes: properties and bad input."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    InfeasibleError,
    UnsupportedError,
)
from fivefold.network.aggregation import (
    AggregationClient,
    AggregationOptions,
    AggregationSwitch,
    read_switch_state,
)
from fivefold.network.aggregation.pool import SlotPool
from fivefold.network.aggregation.wire import (
    DTYPES,
    Frame,
    FrameReader,
    FrameWriter,
    Kind,
    OrderedSum,
    ordered_sum,
    stored_as,
)
from helpers.switch_process import SwitchProcess


def values_of(dtype, parts, size, seed=0):
    generator = np.random.default_rng(seed)
    if dtype == "bfloat16":
        wide = generator.standard_normal((parts, size)).astype(np.float32)
        return list((wide.view(np.uint32) >> 16).astype(np.uint16))
    if dtype.startswith("int"):
        bounds = np.iinfo(dtype)
        return list(generator.integers(bounds.min, bounds.max, (parts, size), dtype=dtype))
    return list((generator.standard_normal((parts, size)) * 100).astype(dtype))


# -- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_has_the_same_bits_in_any_order_of_arrival(dtype):
    parts = values_of(dtype, 7, 129)
    expected = ordered_sum(parts, dtype)
    for seed in range(5):
        total = OrderedSum(dtype, 7)
        order = np.random.default_rng(seed).permutation(7).tolist()
        assert [total.add(rank, parts[rank]) for rank in order] == [False] * 6 + [True]
        assert total.result().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_a_sum_is_a_loop_over_ranks(dtype):
    parts = values_of(dtype, 5, 1000)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected = expected + part  # integers wrap
    assert np.array_equal(ordered_sum(parts), expected)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)]
)
def test_half_precision_is_added_in_single_and_rounded_once_as_torch_rounds(dtype, kind):
    parts = values_of(dtype, 9, 4000)
    tensors = [torch.from_numpy(part.view(np.int16)).view(kind).float() for part in parts]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    expected = total.to(kind).view(torch.int16).numpy().view(stored_as(dtype))
    assert np.array_equal(ordered_sum(parts, dtype), expected)


def test_infinities_and_no_numbers_stay_what_they_are():
    parts = [np.array([np.inf, np.inf, 3e38], np.float32), np.array([-np.inf, 1, 3e38], np.float32)]
    total = ordered_sum(parts)
    assert np.isnan(total[0])
    assert total[1] == total[2] == np.inf
    halves = [(part.view(np.uint32) >> 16).astype(np.uint16) for part in parts]
    assert ordered_sum(halves, "bfloat16").tolist() == [0x7FC0, 0x7F80, 0x7F80]


def test_sums_that_do_not_exist():
    with pytest.raises(UnsupportedError, match="complex64"):
        ordered_sum([np.zeros(1, np.complex64)])
    with pytest.raises(ConfigurationError, match="cannot hold bfloat16"):
        ordered_sum([np.zeros(1, np.float32)], "bfloat16")
    with pytest.raises(ConfigurationError, match="nothing to sum"):
        ordered_sum([])


# -- slots -------------------------------------------------------------------------------------


def part(values, chunk, *, sequence=0, total=None):
    data = values.tobytes()
    return Frame(Kind.DATA, data, values.dtype.name, chunk, sequence, total or len(data))


def joined(pool, job, size, window=4, sequence=0):
    for rank in range(size):
        pool.join(job, rank, size=size, window=window, sequence=sequence)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    slots=st.integers(1, 6),
    chunks=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_whatever_the_order_each_chunk_is_summed_or_refused_for_all(sizes, slots, chunks, seed):
    """Several jobs with more chunks than slots, parts in any order: nothing is half done."""
    pool = SlotPool(slots=slots, slot_bytes=64)
    waiting = []
    for number, size in enumerate(sizes):
        joined(pool, f"job{number}", size)
        values = values_of("float32", size, 8, seed=seed + number)
        waiting += [
            (f"job{number}", rank, chunk, values[rank])
            for rank in range(size)
            for chunk in range(chunks)
        ]
    waiting = [waiting[at] for at in np.random.default_rng(seed).permutation(len(waiting))]
    told = {}
    for job, rank, chunk, values in waiting:
        for of_job, ranks, frame in pool.contribute(job, rank, part(values, chunk), now_s=0.0):
            assert of_job == job
            assert ranks == tuple(range(sizes[int(job[3:])]))
            assert (job, frame.chunk) not in told
            told[job, frame.chunk] = frame
        state = pool.state()
        assert 0 <= state.slots_free <= slots
    for number, size in enumerate(sizes):
        expected = ordered_sum(values_of("float32", size, 8, seed=seed + number))
        for chunk in range(chunks):
            frame = told[f"job{number}", chunk]
            if frame.kind is Kind.RESULT:
                assert bytes(memoryview(frame.payload).cast("B")) == expected.tobytes()
            else:
                assert frame.content() == {"reason": "slots"}
    state = pool.state()
    assert state.slots_free == slots
    assert state.most_used <= slots
    assert state.hits + state.misses == len(told) == chunks * len(sizes)


def test_a_new_collective_frees_what_an_older_one_left():
    pool = SlotPool(slots=1, slot_bytes=64)
    joined(pool, "a", 2)
    one = np.ones(2, np.float32)
    assert pool.contribute("a", 0, part(one, 0, sequence=0), now_s=0.0) == []
    assert pool.contribute("a", 0, part(one, 0, sequence=1), now_s=0.0) == []
    assert pool.contribute("a", 1, part(one, 0, sequence=0), now_s=0.0) == []  # too late
    ((_, _, frame),) = pool.contribute("a", 1, part(one, 0, sequence=1), now_s=0.0)
    assert frame.kind is Kind.RESULT
    assert np.frombuffer(frame.payload, np.float32).tolist() == [2.0, 2.0]


def test_a_chunk_that_waits_too_long_is_given_up_once_and_names_who_is_missing():
    pool = SlotPool(slots=2, slot_bytes=64, expire_s=1.0)
    joined(pool, "a", 3)
    one = np.ones(2, np.float32)
    pool.contribute("a", 1, part(one, 5), now_s=0.0)
    assert pool.expire(0.9) == []
    ((job, ranks, frame),) = pool.expire(1.1)
    assert (job, ranks, frame.chunk) == ("a", (0, 1, 2), 5)
    assert frame.content() == {"reason": "late", "ranks": [0, 2]}
    assert pool.expire(9.0) == []
    assert pool.contribute("a", 0, part(one, 5), now_s=2.0) == []
    assert pool.state().slots_free == 2


def test_reserved_slots_belong_to_one_job_until_it_ends():
    pool = SlotPool(slots=8, slot_bytes=64, sharing="reserved")
    assert pool.join("a", 0, size=1, window=6, sequence=0) == 6
    assert pool.join("b", 0, size=1, window=6, sequence=0) == 2
    with pytest.raises(InfeasibleError, match="no slot is free for job 'c'"):
        pool.join("c", 0, size=1, window=1, sequence=0)
    assert pool.leave("a", 0) == []
    assert pool.join("c", 0, size=1, window=9, sequence=0) == 6


def test_parts_of_different_sizes_are_refused():
    pool = SlotPool(slots=2, slot_bytes=64)
    joined(pool, "a", 2)
    pool.contribute("a", 0, part(np.ones(2, np.float32), 0), now_s=0.0)
    ((_, ranks, frame),) = pool.contribute("a", 1, part(np.ones(4, np.float32), 0), now_s=0.0)
    assert ranks == (0, 1)
    assert frame.content()["reason"] == "mismatch"


def test_who_leaves_ends_the_jobs_chunks_and_the_others_are_told():
    pool = SlotPool(slots=2, slot_bytes=64)
    joined(pool, "a", 3)
    pool.contribute("a", 0, part(np.ones(2, np.float32), 0), now_s=0.0)
    ((_, ranks, frame),) = pool.leave("a", 1)
    assert (ranks, frame.kind, frame.chunk) == ((0, 2), Kind.GONE, 1)
    assert pool.state().slots_free == 2
    ((_, _, frame),) = pool.contribute("a", 0, part(np.ones(2, np.float32), 1), now_s=0.0)
    assert frame.content() == {"reason": "absent", "ranks": [1]}


@pytest.mark.parametrize(
    "options",
    [
        {"slots": -1, "slot_bytes": 64},
        {"slots": 1, "slot_bytes": 12},
        {"slots": 1, "slot_bytes": 64, "sharing": "fair"},
        {"slots": 1, "slot_bytes": 64, "expire_s": 0.0},
    ],
)
def test_a_pool_says_what_it_cannot_be(options):
    with pytest.raises(ConfigurationError):
        SlotPool(**options)


def test_jobs_of_one_name_must_be_of_one_size():
    pool = SlotPool(slots=2, slot_bytes=64)
    pool.join("a", 0, size=2, window=1, sequence=0)
    with pytest.raises(ConfigurationError, match="has 2 ranks, not 3"):
        pool.join("a", 1, size=3, window=1, sequence=0)
    with pytest.raises(ConfigurationError, match="rank 5 of 2"):
        pool.join("a", 5, size=2, window=1, sequence=0)


# -- frames ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 5000), max_size=12), seed=st.integers(0, 99))
def test_frames_arrive_as_they_were_sent(sizes, seed):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        data = np.random.default_rng(seed)
        sent = [
            Frame(Kind.DATA, data.bytes(size), str(data.choice(DTYPES)), at, at * 7, size * 3)
            for at, size in enumerate(sizes)
        ]
        writer, reader = FrameWriter(), FrameReader(5000)
        for frame in sent:
            writer.put(frame)
        found = []
        while len(found) < len(sent):
            writer.flush(ours)
            frame = reader.read(theirs)
            if frame is not None:
                found.append(frame)
        assert writer.waiting_bytes == 0
        for frame, other in zip(sent, found, strict=True):
            assert bytes(other.payload) == frame.payload
            assert (other.kind, other.dtype, other.chunk) == (frame.kind, frame.dtype, frame.chunk)
            assert (other.sequence, other.total) == (frame.sequence, frame.total)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: switch\r\nAccept: */*\r\n\r\n",
        b"\x00" * 64,
        b"5agg" + b"\xff" * 64,
        b"5agg\x04\x00\x00\x00" + b"\x00" * 20 + b"\x7f\xff\xff\xff",  # two gigabytes to come
        b"5agg\x01\x00\x00\x00" + b"\x00" * 20 + b"\x00\x00\x00\x03{]}",
        b"5agg\x01\x00\x00\x00" + b"\x00" * 20 + b"\x00\x00\x00\x02[]",
        b"5agg\x04\x00\x00\x00" + b"\x00" * 20 + b"\x00\x00\x00\x03abc",  # data before a join
        b"5agg\x05\x00\x00\x00" + b"\x00" * 24,  # a result, from a client
    ],
)
def test_noise_costs_its_sender_the_connection_and_the_switch_nothing(noise):
    with AggregationSwitch(slots=2, slot_bytes=64) as switch:
        switch.start()
        host, _, port = switch.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert read_switch_state(switch.address).slots_free == 2


def test_a_part_that_is_no_whole_number_of_elements_ends_the_connection():
    with AggregationSwitch(slots=2, slot_bytes=64) as switch:
        switch.start()
        host, _, port = switch.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            writer = FrameWriter()
            said = {"job": "a", "rank": 0, "size": 1, "window": 1, "sequence": 0}
            writer.put(Frame.of_text(Kind.JOIN, said))
            writer.put(Frame(Kind.DATA, b"abc", "float32", 0, 0, 3))
            writer.flush(connection)
            while True:
                try:
                    if not connection.recv(4096):
                        break
                except ConnectionResetError:
                    break
        assert read_switch_state(switch.address).jobs == 0


# -- clients without peers ---------------------------------------------------------------------


class Alone:
    def minimum(self, flags):
        return flags

    def sum(self, values, dtype):
        return ordered_sum([values], dtype)


@pytest.mark.parametrize("port", [-1, 70_000, "80"])
def test_a_switch_refuses_what_is_no_port(port):
    with pytest.raises(ConfigurationError, match="port must be a whole number from 0 to 65,535"):
        AggregationSwitch(port=port)


def test_bad_arguments_of_a_client():
    with pytest.raises(ConfigurationError, match="rank 2"):
        AggregationClient("127.0.0.1:1", job="a", rank=2, size=2, fallback=Alone())
    for rank, size in (("0", 2), (0, "2"), (-1, 2)):
        with pytest.raises(ConfigurationError, match="must be a whole number"):
            AggregationClient("127.0.0.1:1", job="a", rank=rank, size=size, fallback=Alone())
    for address in ("nowhere", "host:", ":5", "host:x", "host:99999", 5):
        with pytest.raises(ConfigurationError, match="no address"):
            AggregationClient(address, job="a", rank=0, size=2, fallback=Alone())
    for options in ({"window": 0}, {"retry_every": "a"}, {"timeout_s": 0.0}, {"timeout_s": "1"}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            AggregationOptions(**options)
    client = AggregationClient("127.0.0.1:1", job="a", rank=0, size=2, fallback=Alone())
    assert not client.is_connected
    with pytest.raises(ConfigurationError, match="contiguous"):
        client.all_reduce(np.zeros((4, 4), np.float32).T[1:])
    with pytest.raises(UnsupportedError, match="complex64"):
        client.all_reduce(np.zeros(2, np.complex64))
    with pytest.raises(ConfigurationError, match="cannot hold int32"):
        client.all_reduce(np.zeros(2, np.float32), dtype="int32")
    for array in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="meta"), [1.0]):
        with pytest.raises(UnsupportedError, match="no array in memory"):
            client.all_reduce(array)


def test_a_switch_that_never_answers_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(CommunicationError, match="did not answer"):
            read_switch_state(address, timeout_s=0.2)
        assert time.monotonic() - began_s < 3.0
        options = AggregationOptions(connect_timeout_s=0.2)
        client = AggregationClient(
            address, job="a", rank=0, size=2, fallback=Alone(), options=options
        )
        assert not client.is_connected


def test_a_peer_of_another_kind_is_no_switch():
    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\nthis is not the page you want")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(CommunicationError, match="is no frame"):
            read_switch_state(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


# -- the process -------------------------------------------------------------------------------


def test_a_switch_process_says_why_it_does_not_start():
    with pytest.raises(CommunicationError, match="positive multiple of 8"):
        SwitchProcess(slot_bytes="12B")
    with SwitchProcess(slots=4) as switch:
        port = switch.address.rpartition(":")[2]
        with pytest.raises(CommunicationError, match="cannot listen"):
            SwitchProcess(port=port)
        assert switch.stop().slots_total == 4
