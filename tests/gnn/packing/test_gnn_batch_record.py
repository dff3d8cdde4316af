"""Batch records: the fast renumbering against a slow one, and the bytes against both."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.gnn.packing._records import SlotTracker, places_in
from fivefold.gnn.packing.record import (
    BatchRecord,
    build_record,
    decode_arrays,
    decode_record,
    encode_arrays,
    encode_record,
)
from fivefold.gnn.planning._caches import CacheSchedule
from fivefold.gnn.sampling.batches import SampledBatch


@st.composite
def batches(draw):
    """A sampled batch, caches and a place on disk for every cold node."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    offset = draw(st.sampled_from([0, 2**31 - 20, 2**40]))
    per_hop = [draw(st.integers(1, 6)), *draw(st.lists(st.integers(0, 12), max_size=3))]
    n = sum(per_hop)
    node_ids = offset + rng.permutation(2 * n)[:n]
    expanded = n - per_hop[-1] if len(per_hop) > 1 else 0
    degrees = rng.integers(0, 5, expanded).astype(np.int32)
    firsts = np.cumsum(per_hop)
    edges_per_hop = [
        int(degrees[a:b].sum()) for a, b in zip([0, *firsts[:-2]], firsts[:-1], strict=False)
    ]
    sampled = SampledBatch(
        number=draw(st.integers(0, 2**40)),
        node_ids=node_ids,
        batch_size=per_hop[0],
        nodes_per_hop=np.array(per_hop),
        edges_per_hop=np.array(edges_per_hop, np.int64),
        degrees=degrees,
        sources=rng.integers(0, n, int(degrees.sum())).astype(np.int32),
        edge_ids=rng.permutation(int(degrees.sum())) if draw(st.booleans()) else None,
    )
    nodes = rng.permutation(np.concatenate([node_ids, offset + 2 * n + np.arange(5)]))
    cut = np.sort(rng.integers(0, len(nodes) + 1, 2))
    device, host, cold = np.split(nodes, cut)
    rows = np.sort(rng.permutation(3 * len(nodes))[: len(cold)])
    return sampled, device, host, dict(zip(cold.tolist(), rows.tolist(), strict=True))


def reference_record(sampled, *, device, host, storage):
    """Renumber a sampled batch.

    Args:
        sampled: A SampledBatch.
        device: Node id in each slot of the device cache.
        host: Node id in each slot of the host cache, or None.
        storage: Mapping of node id to row among the packed rows.

    Returns:
        Mapping of names to lists.
    """
    ids = sampled.node_ids.tolist()
    slot_of = {node: ("device", slot) for slot, node in enumerate(device)}
    slot_of |= {node: ("host", slot) for slot, node in enumerate(host) if node is not None}
    level = {node: slot_of.get(node, ("disk", storage.get(node))) for node in ids}
    rank = {"device": 0, "host": 1, "disk": 2}
    seeds = ids[: sampled.batch_size]
    others = sorted(ids[sampled.batch_size :], key=lambda v: (rank[level[v][0]], level[v][1]))
    order = seeds + others
    local = {node: number for number, node in enumerate(order)}
    edges = [(local[ids[a]], local[ids[b]]) for a, b in sampled.edge_index().T.tolist()]
    where = {
        name: sorted((local[v], level[v][1]) for v in ids if level[v][0] == name) for name in rank
    }
    return {
        "node_ids": order,
        "edges": edges,
        "device": where["device"],
        "host": where["host"],
        "disk": where["disk"],
    }


def as_reference(record):
    """The same mapping, read off a BatchRecord."""
    pairs = {
        "device": (record.device_destinations, record.device_slots),
        "host": (record.host_destinations, record.host_slots),
        "disk": (record.cold_destinations, record.cold_rows),
    }
    levels = {
        name: sorted(zip(a.tolist(), b.tolist(), strict=True)) for name, (a, b) in pairs.items()
    }
    return {
        "node_ids": record.node_ids.tolist(),
        "edges": list(map(tuple, record.edge_index().T.tolist())),
        **levels,
    }


def tracker_of(device, host, admissions=(), *, num_nodes, num_slots=None, dense_bytes=10**5):
    """A tracker of two caches, of which the host's changes by (nodes, slots) after each batch."""
    rows, slots = ([np.array(part[i]) for part in admissions] for i in (0, 1))
    schedule = CacheSchedule(
        hit_bits=np.empty(0, np.uint8),
        hit_starts=np.zeros(1, np.int64),
        admitted_rows=np.concatenate([np.empty(0, np.int64), *rows]),
        admitted_slots=np.concatenate([np.empty(0, np.int32), *slots]),
        admitted_starts=np.cumsum([0, *map(len, rows)]),
    )
    plan = SimpleNamespace(
        device_rows=device,
        host_rows=host,
        num_host_slots=len(host) if num_slots is None else num_slots,
        cache_schedule=schedule if admissions else None,
    )
    return SlotTracker(plan, num_nodes=num_nodes, dense_bytes=dense_bytes)


def build(sampled, device, host, storage):
    nodes = int(max(map(int, [*sampled.node_ids, *device, *host]))) + 1
    tracker = tracker_of(device, host, num_nodes=nodes)
    slots = tracker.slots(sampled.node_ids)
    cold = np.flatnonzero(slots < 0)
    rows = np.array([storage[node] for node in sampled.node_ids[cold].tolist()], np.int64)
    order = np.argsort(rows)
    return build_record(
        sampled, slots=slots, num_device=len(device), cold=cold[order], cold_rows=rows[order]
    )


@given(batches())
def test_a_record_is_what_the_slow_way_makes(case):
    sampled, device, host, storage = case
    record = build(*case)
    expected = reference_record(sampled, device=device, host=host, storage=storage)
    assert as_reference(record) == expected
    decoded = decode_record(encode_record(record), number=sampled.number)
    assert as_reference(decoded) == expected
    for field in dataclasses.fields(BatchRecord):
        ours, theirs = getattr(decoded, field.name), getattr(record, field.name)
        if not field.name.startswith("run_") and theirs is not None:
            assert np.array_equal(ours, theirs), field.name
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), field.name
    assert (np.diff(record.run_starts) > 0).all()
    if sampled.edge_ids is not None:
        assert np.array_equal(decoded.edge_ids, sampled.edge_ids)


@given(st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=20), max_size=6), st.booleans())
def test_arrays_come_back(lists, ordered):
    arrays = [np.array(sorted(values) if ordered else values, np.int64) for values in lists]
    block = encode_arrays(arrays, ascending=range(len(arrays)) if ordered else ())
    assert block.size % 8 == 0
    padded = np.concatenate([block, np.full(40, 7, np.uint8)])
    found = decode_arrays(padded)
    assert [array.tolist() for array in found] == [array.tolist() for array in arrays]


def test_small_numbers_take_small_space():
    slots = np.arange(0, 300_000, 3)
    assert encode_arrays([slots], ascending={0}).size < len(slots) + 100
    assert encode_arrays([np.full(1000, 70_000)]).size < 4100


@pytest.mark.parametrize("damage", ["short", "mark", "width", "count", "number"])
def test_a_record_that_is_damaged_or_of_another_batch_is_refused(damage):
    block = encode_arrays([np.arange(10), np.array([2])])
    words = block.view(np.int64)
    if damage == "short":
        block = block[:-8]
    elif damage == "mark":
        words[0] += 1
    elif damage == "width":
        words[4] = 3
    elif damage == "count":
        words[3] = 10**6
    with pytest.raises(DataError):
        decode_arrays(block) if damage != "number" else decode_record(block, number=3)


@given(st.integers(0, 2**32), st.booleans())
def test_slots_follow_admissions(seed, dense):
    rng = np.random.default_rng(seed)
    num_nodes, num_slots = 40, int(rng.integers(1, 8))
    device = rng.permutation(num_nodes)[:3]
    rest = np.setdiff1d(np.arange(num_nodes), device)
    host = rng.permutation(rest)[: int(rng.integers(0, num_slots + 1))]
    content = dict(enumerate(host.tolist()))
    admissions, expected = [], []
    for _ in range(6):
        fresh = np.setdiff1d(rest, list(content.values()))
        slots = rng.permutation(num_slots)[: int(rng.integers(0, num_slots + 1))]
        nodes = rng.permutation(fresh)[: len(slots)]
        admissions.append((nodes, slots[: len(nodes)]))
        content |= dict(zip(slots.tolist(), nodes.tolist(), strict=False))
        now = np.full(num_nodes, -1)
        now[device] = np.arange(3)
        for slot, node in content.items():
            now[node] = 3 + slot
        expected.append(now)
    tracker = tracker_of(
        device,
        host,
        admissions,
        num_nodes=num_nodes,
        num_slots=num_slots,
        dense_bytes=10**6 if dense else 0,
    )
    for batch, now in enumerate(expected):
        tracker.advance(batch)
        assert np.array_equal(tracker.slots(np.arange(num_nodes)), now)


@pytest.mark.parametrize("num_nodes", [100, 10**6])
def test_places_in_a_batch(num_nodes):
    for ids in ([5, 3, 99, 0, 7, 8], [3, 5], [42]):
        place_of = places_in(np.array(ids), num_nodes)
        assert place_of(np.array(ids[::-1])).tolist() == list(range(len(ids)))[::-1]
        assert place_of(np.array([], np.int64)).tolist() == []
        assert place_of(np.array([ids[0], 50])).tolist() == [0, -1]
