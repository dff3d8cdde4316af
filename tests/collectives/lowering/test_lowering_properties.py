# ruff: noqa: C901, PLR0912, PLR0915, S311, S314 - random schedules and machines in one piece; our own files
"""Programs of random schedules on random unequal networks, judged by interpreters of the files.

The interpreters here know nothing of the library: they read the XML and the plan as text, run all
thread blocks in a random order with queues of a few chunks, and compare with sums that are computed
from the collective's conditions alone. What was never written is None, so that using it fails.
"""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives import lowering, schedules
from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.lowering.program import (
    Buffer,
    Operation,
    OpKind,
    RankProgram,
    ThreadBlock,
)
from fivefold.collectives.synthesis import synthesize
from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.network.topology import Link, Node, Topology, named_topology
from helpers.night import by_day

NAMES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
)
IN_PLACE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
PLANS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


# -- schedules -----------------------------------------------------------------------------------


def random_tree(ranks, root, numbers):
    """Parent of each rank of a random tree, in an order in which parents come first."""
    inside, parents = [root], {}
    others = [rank for rank in ranks if rank != root]
    numbers.shuffle(others)
    for rank in others:
        parents[rank] = numbers.choice(inside)
        inside.append(rank)
    return parents


def random_schedule(collective, numbers, *, timed):
    """Sums up and copies down random trees, of transfers that last as long as they like."""
    pace = {}
    moves, ready = [], {}

    def send(chunk, source, target, *, start, reduces, step):
        lasts = pace.setdefault((source, target), numbers.choice([1.0, 1.0, 2.0, 3.5]))
        start += numbers.choice([0.0, 0.0, 1.0, 2.5])
        times = {"start_s": start, "end_s": start + lasts} if timed else {"step": step}
        moves.append(
            schedules.Transfer(chunk=chunk, source=source, target=target, reduces=reduces, **times)
        )
        return start + lasts

    for chunk in range(collective.num_chunks):
        holders = collective.holders(chunk).tolist()
        receivers = collective.receivers(chunk).tolist()
        root = numbers.choice(receivers if collective.reducing else holders)
        level = 0
        ready = dict.fromkeys(range(collective.num_ranks), 0.0)
        if collective.reducing:
            parents = random_tree(holders, root, numbers)
            level = len(parents)
            for place, (child, parent) in enumerate(reversed(parents.items())):
                end = send(chunk, child, parent, start=ready[child], reduces=True, step=place)
                ready[parent] = max(ready[parent], end)
        parents = random_tree({root, *receivers}, root, numbers)
        for place, (child, parent) in enumerate(parents.items()):
            ready[child] = send(
                chunk, parent, child, start=ready[parent], reduces=False, step=level + place
            )
    if numbers.random() < 0.5:
        numbers.shuffle(moves)
    return schedules.Schedule.from_transfers(moves, collective=collective)


def random_network(count, numbers):
    """A ring both ways and a few chords, no two links alike."""
    nodes = [Node(f"g{rank}", "gpu") for rank in range(count)]
    pairs = {(rank, (rank + 1) % count) for rank in range(count)}
    pairs |= {(b, a) for a, b in pairs}
    for _ in range(numbers.randrange(count)):
        pairs.add(tuple(numbers.sample(range(count), 2)))
    links = [
        Link(
            f"g{a}",
            f"g{b}",
            bandwidth_bytes_per_s=numbers.choice([1e9, 2e9, 3e9, 7e9]),
            latency_s=numbers.choice([0.0, 1e-6, 5e-6]),
        )
        for a, b in sorted(pairs)
    ]
    return Topology("random", nodes, links)


# -- values --------------------------------------------------------------------------------------


def inputs_and_outputs(collective):
    """What lies in each input slot, and what must lie in each output slot at last."""
    inputs, totals, outputs = {}, defaultdict(int), {}
    slots = collective.input_address(collective.pre_chunks, collective.pre_ranks)
    for chunk, rank, slot in zip(
        collective.pre_chunks.tolist(), collective.pre_ranks.tolist(), slots.tolist(), strict=True
    ):
        value = (chunk + 1) * 10**6 + (3**rank if collective.reducing else 0)
        inputs[rank, slot] = value
        totals[chunk] = totals[chunk] + value if collective.reducing else value
    slots = collective.output_address(collective.post_chunks, collective.post_ranks)
    for chunk, rank, slot in zip(
        collective.post_chunks.tolist(), collective.post_ranks.tolist(), slots.tolist(), strict=True
    ):
        outputs[rank, slot] = totals[chunk]
    return inputs, outputs


def memory_of(collective, *, in_place):
    """Cell of a buffer's slot, and the cells that hold something at first."""
    alias = {}
    if in_place:
        chunks = range(collective.num_chunks)
        for rank in range(collective.num_ranks):
            held = collective.input_address(chunks, rank).tolist()
            wanted = collective.output_address(chunks, rank).tolist()
            alias |= {
                (rank, "o", there): (rank, "i", here)
                for here, there in zip(held, wanted, strict=True)
                if here >= 0 and there >= 0
            }
    inputs, outputs = inputs_and_outputs(collective)
    memory = {(rank, "i", slot): value for (rank, slot), value in inputs.items()}

    def cell(rank, buffer, slot):
        return alias.get((rank, buffer, slot), (rank, buffer, slot))

    return cell, memory, outputs


def require_outputs(cell, memory, outputs):
    for (rank, slot), value in outputs.items():
        assert memory.get(cell(rank, "o", slot)) == value, (rank, slot)


# -- interpreters --------------------------------------------------------------------------------


def run_xml(text, collective, *, slots, seed):
    """Run an MSCCL file chunk by chunk, as the kernel does, with blocks in a random order."""
    root, numbers = ET.fromstring(text), random.Random(seed)
    cell, memory, outputs = memory_of(collective, in_place=root.get("inplace") == "1")
    queues, done, blocks = defaultdict(deque), {}, []
    for gpu in root:
        for block in gpu:
            rank, name = int(gpu.get("id")), int(block.get("id"))
            done[rank, name] = 0
            blocks.append((rank, name, block, list(block), [0]))

    def advance(rank, name, block, steps, moved):
        """Move one chunk; False where that is not possible now."""
        step = steps[done[rank, name]]
        kind, count = step.get("type"), int(step.get("cnt"))
        wait = (rank, int(step.get("depid")))
        if wait[1] >= 0 and done[wait] <= int(step.get("deps")):
            return False
        if kind != "nop":
            receives, sends = kind.startswith("r") and kind != "re", kind.endswith("s")
            channel = int(block.get("chan"))
            inbox = queues[int(block.get("recv")), rank, channel]
            outbox = queues[rank, int(block.get("send")), channel]
            if (receives and not inbox) or (sends and len(outbox) >= slots):
                return False
            source = cell(rank, step.get("srcbuf"), int(step.get("srcoff")) + moved[0])
            target = cell(rank, step.get("dstbuf"), int(step.get("dstoff")) + moved[0])
            if receives:
                value = inbox.popleft() + (memory[source] if "rr" in kind else 0)
            else:
                value = memory[source] + (memory[target] if kind == "re" else 0)
            if kind not in ("s", "rrs"):
                memory[target] = value
            if sends:
                outbox.append(value)
        moved[0] += 1
        if moved[0] >= count:
            moved[0] = 0
            done[rank, name] += 1
        return True

    left = [block for block in blocks if block[3]]
    while left:
        numbers.shuffle(left)
        assert any(advance(*block) for block in left), "deadlock"
        left = [block for block in left if done[block[0], block[1]] < len(block[3])]
    assert not any(queues.values()), "messages are left"
    require_outputs(cell, memory, outputs)


class Threads:
    """What a block's threads may be at since they last met at a nop: nothing may depend on it."""

    def __init__(self):
        self.moving, self.told, self.read, self.written = False, False, set(), set()

    def check(self, kind, reads, writes):
        if kind == "nop":
            self.__init__()
        elif kind in ("wait", "sem_acquire"):
            self.told = True
        elif kind in ("signal", "sem_release", "pws", "pwsf"):
            assert not any((self.told, self.moving)), f"{kind} before all threads are there"
            self.told = kind == "pwsf"
        else:
            assert not self.told, f"{kind} before all threads know that they may"
            assert self.written.isdisjoint(reads | writes)
            assert self.read.isdisjoint(writes)
            self.moving = True
            self.read |= reads
            self.written |= writes


def run_plan(text, collective, *, seed, hosts=None):
    """Run an MSCCL++ plan: puts through memory land at once, those of ports at any later time."""
    plan, numbers = json.loads(text), random.Random(seed)
    cell, memory, outputs = memory_of(collective, in_place=plan["inplace"])
    signals, semaphores, done = defaultdict(int), defaultdict(int), defaultdict(int)
    threads, posted = defaultdict(Threads), defaultdict(deque)
    gpus = {gpu["id"]: gpu for gpu in plan["gpus"]}

    def end_of(rank, block, operation):
        """The channel's peer, and which of the channels of its type between the two it is."""
        kind = operation["channel_type"]
        [own] = [one for one in block["channels"] if one["channel_type"] == kind]
        [all_of] = [one for one in gpus[rank]["channels"] if one["channel_type"] == kind]
        peers, number = all_of["connected_to"], own["channel_ids"][operation["channel_ids"][0]]
        peer = peers[number]
        assert hosts is None or (hosts[rank] != hosts[peer]) == (kind == "port")
        return peer, kind, peers[:number].count(peer)

    def cells_of(rank, block, kind, chunk):
        if "buffer_id" not in chunk:
            there, buffer = rank, chunk["type"]
        else:
            [listed] = block["remote_buffer_refs"]
            assert listed["access_channel_type"] == kind
            number = listed["remote_buffer_ids"][chunk["buffer_id"]]
            remote = gpus[rank]["remote_buffers"][number]
            assert kind in remote["access_channel_types"]
            there, buffer = remote["rank"], remote["type"]
        return [cell(there, buffer, chunk["index"] + at) for at in range(chunk["size"])]

    def put(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            memory[target] = memory[source]

    def deliver(key):
        rank, peer, *which = key
        put(*posted[key].popleft())
        signals[rank, peer, *which] += 1

    def carry_out(rank, block, operation):
        kind, through = operation["name"], operation.get("channel_type")
        sides = [operation.get(side, []) for side in ("src_buff", "dst_buff")]
        sources, targets = (
            [cells_of(rank, block, through, chunk) for chunk in side] for side in sides
        )
        if kind in ("signal", "wait", "pws", "pwsf"):
            peer, *which = end_of(rank, block, operation)
            if kind == "wait" and not signals[peer, rank, *which]:
                return False
            if kind == "wait":
                signals[peer, rank, *which] -= 1
            elif kind == "signal":
                signals[rank, peer, *which] += 1
            else:
                key, again = (rank, peer, *which), (rank, block["id"], "flushing")
                if not done[again]:
                    assert len(sources) == len(targets) == 1
                    posted[key].append((sources[0], targets[0]))
                if kind == "pwsf":
                    done[again] = bool(posted[key])
                    if posted[key]:
                        return False
        elif kind in ("sem_acquire", "sem_release"):
            key = (rank, operation["semaphore_ids"][0])
            if kind == "sem_acquire" and not semaphores[key]:
                return False
            semaphores[key] += 1 if kind == "sem_release" else -1
        elif kind in ("copy", "put"):
            assert len({chunk["type"] for chunk in sides[0]}) == 1 <= len(sources) <= 8
            for source, target in zip(sources, targets, strict=True):
                put(source, target)
        elif kind in ("re", "res"):
            assert len(sources) == 2
            sums = [memory[a] + memory[b] for a, b in zip(*sources, strict=True)]
            assert len(targets) == (1 if kind == "re" else 2)
            for target in targets:
                for at, value in zip(target, sums, strict=True):
                    memory[at] = value
        else:
            assert kind == "nop"
        flat = [{at for chunk in side for at in chunk} for side in (sources, targets)]
        threads[rank, block["id"]].check(kind, *flat)
        return True

    left = [(rank, b) for rank, gpu in gpus.items() for b in gpu["threadblocks"] if b["ops"]]
    while left:
        waiting = [key for key, messages in posted.items() if messages]
        if waiting and numbers.random() < 0.3:
            deliver(numbers.choice(waiting))
            continue
        numbers.shuffle(left)
        moved = False
        for rank, block in left:
            if carry_out(rank, block, block["ops"][done[rank, block["id"]]]):
                done[rank, block["id"]] += 1
                moved = True
                break
        if not moved:
            waiting = [key for key, messages in posted.items() if messages]
            assert waiting, "deadlock"
            deliver(numbers.choice(waiting))
        left = [(rank, b) for rank, b in left if done[rank, b["id"]] < len(b["ops"])]
    assert not any(posted.values()), "the kernel ends while its buffers are still being read"
    require_outputs(cell, memory, outputs)


def require_right(schedule, numbers, **options):
    """Lower, write both files, and run them."""
    collective = schedule.collective
    if collective.name in IN_PLACE:
        options["in_place"] = numbers.random() < 0.5
    program = lowering.lower(schedule, **options)
    collective = program.collective
    for slots in (2, 3, 4):
        lowering.check_program(program, queue_slots=slots)
    text = lowering.to_msccl_xml(program, check_limits=False)
    assert lowering.from_msccl_xml(text, collective=collective) == program
    for seed, slots in enumerate((2, 3, 4, 2)):
        run_xml(text, collective, slots=slots, seed=seed)
    if collective.name in PLANS:
        hosts = [numbers.randrange(2) for _ in range(collective.num_ranks)]
        plan = lowering.to_mscclpp_json(program, hosts=hosts, check_limits=False)
        for seed in range(3):
            run_plan(plan, collective, seed=seed, hosts=hosts)


@by_day(20)
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 5),
    chunks=st.integers(1, 6),
    timed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_trees_become_right_programs(name, ranks, chunks, timed, seed):
    numbers = random.Random(seed)
    chunks = min(chunks, 2) if name == "all_to_all" else chunks
    collective = schedules.named_collective(name, ranks, chunks=chunks)
    schedule = random_schedule(collective, numbers, timed=timed)
    schedules.verify_schedule(schedule)
    options = {
        "channels": numbers.choice([1, 1, 2]),
        "instances": numbers.choice([1, 1, 2]),
        "fuse": numbers.random() < 0.7,
        "max_count": numbers.choice([1, 3, 64]),
    }
    require_right(schedule, numbers, **options)


def require_found_is_right(name, method, ranks, chunks, seed):
    """Synthesise on a random network, and run what comes of it."""
    numbers = random.Random(seed)
    if name in ("all_to_all", "scatter", "gather"):
        method = "library"
    elif name == "all_reduce":
        chunks *= ranks
    collective = schedules.named_collective(name, ranks, chunks=chunks)
    found = synthesize(
        collective, random_network(ranks, numbers), size_bytes=1e6, method=method, time_limit_s=1.0
    )
    schedules.verify_schedule(found.schedule, check_times=found.schedule.has_times)
    require_right(found.schedule, numbers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["matching", "trees"])
def test_algorithms_of_an_unequal_network_become_right_programs(name, method):
    require_found_is_right(name, method, 4, 2, seed=7)


@pytest.mark.nightly
@given(
    name=st.sampled_from(NAMES),
    method=st.sampled_from(["matching", "trees"]),
    ranks=st.integers(3, 5),
    chunks=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_algorithms_of_unequal_networks_become_right_programs(name, method, ranks, chunks, seed):
    require_found_is_right(name, method, ranks, chunks, seed)


@pytest.mark.parametrize("name", NAMES)
def test_messages_go_only_where_there_is_a_link(name):
    numbers = random.Random(3)
    network = random_network(5, numbers)
    joined = {(link.source, link.target) for link in network.links}
    collective = schedules.named_collective(name, 5, chunks=10 if name == "all_reduce" else 2)
    for algorithm in available_algorithms(collective):
        if algorithm in ("in_network_tree", "hierarchical"):
            continue
        schedule = build_algorithm(algorithm, collective, network)
        program = lowering.lower(schedule, channels=2)
        pairs = {(f"g{rank}", f"g{block.send_peer}") for rank, _, block in program.blocks()}
        assert {pair for pair in pairs if pair[1] != "g-1"} <= joined
        require_right(schedule, numbers)


def test_other_runtimes_send_straight():
    network = random_network(5, random.Random(3))
    schedule = build_algorithm("direct", schedules.named_collective("all_gather", 5), network)
    assert lowering.check_program(lowering.lower(schedule, relay=False)).num_messages == 20
    assert lowering.check_program(lowering.lower(schedule)).num_messages > 20


# -- what was wrong once -------------------------------------------------------------------------


def test_partial_sums_that_arrive_together_are_added_in_one_order():
    # Both sums arrive at 3 s; the first that is listed was sent last.
    moves = [
        schedules.Transfer(chunk=0, source=1, target=0, reduces=True, start_s=2.0, end_s=3.0),
        schedules.Transfer(chunk=0, source=2, target=0, reduces=True, start_s=0.0, end_s=3.0),
        schedules.Transfer(chunk=0, source=0, target=1, start_s=3.0, end_s=4.0),
        schedules.Transfer(chunk=0, source=0, target=2, start_s=3.0, end_s=5.0),
    ]
    schedule = schedules.Schedule.from_transfers(moves, collective=schedules.all_reduce(3, 1))
    schedules.verify_schedule(schedule)
    require_right(schedule, random.Random(0))


def test_pieces_keep_the_order_that_the_times_gave():
    # Listed backwards: only the times say that the sum comes before the copy.
    moves = [
        schedules.Transfer(chunk=0, source=0, target=1, start_s=1.0, end_s=2.0),
        schedules.Transfer(chunk=0, source=1, target=0, reduces=True, start_s=0.0, end_s=1.0),
    ]
    schedule = schedules.Schedule.from_transfers(moves, collective=schedules.all_reduce(2, 1))
    schedules.verify_schedule(schedule.replicated(3))
    require_right(schedule, random.Random(0), instances=3)


def test_a_sum_is_formed_in_the_order_of_its_schedule():
    # Rank 2's two chunks lie side by side and go in one step, but chunk 1 of rank 1 comes between.
    moves = [
        schedules.Transfer(chunk=chunk, source=source, target=0, reduces=True, step=step)
        for step, chunk, source in [
            (0, 0, 3),
            (0, 1, 3),
            (1, 0, 2),
            (1, 1, 1),
            (1, 1, 2),
            (1, 0, 1),
        ]
    ]
    collective = schedules.named_collective("reduce", 4, chunks=2)
    program = lowering.lower(schedules.Schedule.from_transfers(moves, collective=collective))
    # 1 is lost where it is added to 2^60 before that is taken off again.
    inputs = [np.array(pair) for pair in ([0.0, 0.0], [1.0, -(2.0**60)], [-(2.0**60), 1.0])]
    outputs = lowering.interpret(program, [*inputs, np.array([2.0**60, 2.0**60])])
    assert outputs[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "recursive_halving_doubling"])
@pytest.mark.parametrize("in_place", [False, True])
def test_long_all_reduces_fit_into_small_queues(algorithm, in_place):
    program = lowering.lower(
        build_algorithm(algorithm, schedules.all_reduce(4, 64)), in_place=in_place
    )
    text = lowering.to_msccl_xml(program, target="executor-256")
    for slots in (2, 3, 4, 16):
        lowering.check_program(program, queue_slots=slots)
        run_xml(text, program.collective, slots=slots, seed=slots)


@pytest.mark.parametrize("name", NAMES)
def test_every_library_algorithm_fits_into_small_queues(name):
    for algorithm in available_algorithms(schedules.named_collective(name, 4, chunks=8)):
        if algorithm not in ("in_network_tree", "hierarchical"):
            schedule = build_algorithm(algorithm, schedules.named_collective(name, 4, chunks=8))
            text = lowering.to_msccl_xml(lowering.lower(schedule), target="executor-256")
            run_xml(text, schedule.collective, slots=2, seed=1)


def test_files_that_would_deadlock_are_not_written():
    program = lowering.lower(build_algorithm("ring", schedules.all_reduce(4, 64)), queue_slots=None)
    lowering.check_program(program)
    with pytest.raises(
        lowering.ProgramError, match="each queue holds 2 chunks; lower its schedule with"
    ):
        lowering.to_msccl_xml(program, target="executor-256")


def test_wrong_programs_are_not_written():
    program = lowering.lower(build_algorithm("ring", schedules.all_gather(3)))
    blocks = program.ranks[1].blocks
    swapped = replace(blocks[0].operations[0], source=Buffer.OUTPUT, source_offset=2)
    block = replace(blocks[0], operations=(swapped, *blocks[0].operations[1:]))
    ranks = (program.ranks[0], replace(program.ranks[1], blocks=(block,)), program.ranks[2])
    wrong = replace(program, ranks=ranks)
    for write in (lowering.to_msccl_xml, lowering.to_mscclpp_json):
        with pytest.raises(lowering.ProgramError, match="where nothing is yet"):
            write(wrong)


def test_plans_wait_for_the_right_step_of_another_block():
    """A block that waits for a late step and then for an early one of the same block."""
    send = [Operation(OpKind.SEND, Buffer.INPUT, 0), Operation(OpKind.SEND, Buffer.INPUT, 1)]
    receive = [
        Operation(OpKind.RECEIVE, Buffer.OUTPUT, 0, Buffer.OUTPUT, 0),
        Operation(OpKind.RECEIVE, Buffer.OUTPUT, 1, Buffer.OUTPUT, 1),
    ]
    passed_on = [
        Operation(OpKind.SEND, Buffer.OUTPUT, 1, wait_block=0, wait_step=1),
        Operation(OpKind.SEND, Buffer.OUTPUT, 0, wait_block=0, wait_step=0),
    ]
    last = [replace(receive[1]), replace(receive[0])]
    copies = [Operation(OpKind.COPY, Buffer.INPUT, 0, Buffer.OUTPUT, 0, 2)]
    ranks = (
        RankProgram((ThreadBlock(tuple(send), 1), ThreadBlock(tuple(copies))), 2, 2),
        RankProgram(
            (ThreadBlock(tuple(receive), -1, 0), ThreadBlock(tuple(passed_on), 2, -1)), 0, 2
        ),
        RankProgram((ThreadBlock(tuple(last), -1, 1),), 0, 2),
    )
    program = lowering.Program(schedules.named_collective("broadcast", 3, chunks=2), ranks)
    lowering.check_program(program)
    text = lowering.to_mscclpp_json(program)
    for seed in range(20):
        run_plan(text, program.collective, seed=seed)


@pytest.mark.parametrize("channels", [1, 3])
def test_plans_whose_blocks_have_channels_both_ways_to_one_peer(channels):
    schedule = build_algorithm("binary_tree", schedules.named_collective("all_reduce", 2))
    program = lowering.lower(schedule, channels=channels, max_count=1)
    for seed in range(5):
        run_plan(lowering.to_mscclpp_json(program), program.collective, seed=seed)


def test_a_plan_says_its_root():
    program = lowering.lower(
        build_algorithm("ring", schedules.named_collective("broadcast", 3, root=1))
    )
    assert json.loads(lowering.to_mscclpp_json(program))["root"] == 1


@given(seed=st.integers(0, 2**32))
def test_plans_of_schedules_fit_and_cross_hosts(seed):
    """A ring of 12 has 22 steps of five operations: several channels share them."""
    numbers = random.Random(seed)
    name = numbers.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    ranks = numbers.randint(2, 6)
    collective = schedules.named_collective(name, ranks, chunks=numbers.choice((None, 4)) or 2)
    algorithm = numbers.choice(available_algorithms(collective))
    try:
        schedule = build_algorithm(algorithm, collective)
    except FivefoldError:  # no hosts, no hierarchy
        return
    hosts = [rank // 2 for rank in range(ranks)]
    text = lowering.to_mscclpp_json(schedule, in_place=numbers.random() < 0.5, hosts=hosts)
    gpus = json.loads(text)["gpus"]
    assert max(len(block["ops"]) for gpu in gpus for block in gpu["threadblocks"]) <= 64
    run_plan(text, collective, seed=seed, hosts=hosts)


@pytest.mark.parametrize("ranks", [12, 16])
def test_a_long_block_is_dealt_over_channels(ranks):
    schedule = build_algorithm("ring", schedules.named_collective("all_reduce", ranks))
    text = lowering.to_mscclpp_json(schedule, in_place=True)
    blocks = [len(gpu["threadblocks"]) for gpu in json.loads(text)["gpus"]]
    assert blocks == [4] * ranks
    run_plan(text, schedule.collective, seed=0)


def test_hosts_of_the_topology_are_joined_by_ports():
    network = named_topology("dgx_a100", boxes=2)
    schedule = build_algorithm("hierarchical", schedules.all_reduce(16), network)
    plan = json.loads(lowering.to_mscclpp_json(schedule))
    for gpu in plan["gpus"]:
        for group in gpu["channels"]:
            apart = {peer // 8 != gpu["id"] // 8 for peer in group["connected_to"]}
            assert apart == {group["channel_type"] == "port"}
    names = {op["name"] for gpu in plan["gpus"] for b in gpu["threadblocks"] for op in b["ops"]}
    assert {"pwsf", "put"} <= names
    with pytest.raises(ConfigurationError, match="3 hosts for 16 ranks"):
        lowering.to_mscclpp_json(schedule, hosts=[0, 0, 1])


@pytest.mark.parametrize("damage", ["flush", "sync", "wait"])
def test_the_interpreter_of_plans_finds_what_is_missing(damage):
    schedule = build_algorithm("recursive_doubling", schedules.all_reduce(4))
    hosts = [0, 0, 1, 1]
    text = lowering.to_mscclpp_json(schedule, in_place=True, hosts=hosts)
    plan = json.loads(text)
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            if damage == "flush":
                for operation in block["ops"]:
                    operation["name"] = operation["name"].replace("pwsf", "pws")
            gone = {"sync": "nop", "wait": "wait"}.get(damage)
            block["ops"] = [one for one in block["ops"] if one["name"] != gone]
    run_plan(text, schedule.collective, seed=1, hosts=hosts)

    def damaged():
        for seed in range(20):
            run_plan(json.dumps(plan), schedule.collective, seed=seed, hosts=hosts)

    with pytest.raises((AssertionError, KeyError)):
        damaged()
