# ruff: noqa: E402 - the environment is looked at first
"""The exchange between processes, in Triton's CPU interpreter.

    TRITON_INTERPRET=1 python exchange_ranks.py FOLDER [LAUNCHES [capacity]]

Forks four ranks, each of which plays the scenes below that have so many ranks, and prints one line
of JSON per scene and rank, at last one with the exit codes. With a number of launches it plays one
scene only, of two ranks, for so long. Nothing but the heaps' words keeps the ranks in step: no
barrier stands between the launches.
"""

import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

assert os.environ["TRITON_INTERPRET"] == "1"

import torch
from group_cases import with_gradients

from fivefold.errors import CommunicationError
from fivefold.moe import MoE, MoEConfig, OneSidedConfig, OneSidedGroup, Router, SharedMemoryHeap
from oracles.experts import expected, operands, relative
from oracles.interpreter import hurry

torch.set_num_threads(1)
hurry()
TIMEOUT_S = 200.0  # for ranks that come late on a busy machine
DEAD_S = 4.0
HIDDEN, INNER, TOP_K = 16, 16, 2


def inputs(ranks, epoch, *, most):
    """All ranks' tokens of an epoch: as many as it happens, routed as skewed as it happens."""
    draw = random.Random(1000 * ranks + epoch)  # noqa: S311 - a test
    experts = 2 * ranks
    counts = [draw.choice([0, 1, most]) for _ in range(ranks)]
    shape = (max(1, sum(counts)), HIDDEN, INNER, experts, TOP_K)
    given = operands(shape, bias=True, dtype=torch.float32, seed=epoch)
    given |= {n: given[n][: sum(counts)] for n in ("x", "topk_ids", "topk_weights")}
    popular = draw.randrange(experts)
    skew = draw.choice(["none", "one expert", "one rank", "dropped"])
    ids = given["topk_ids"]
    if skew == "one expert":
        ids[:, 0], ids[:, 1] = popular, -1
    elif skew == "one rank":
        ids[:, 0], ids[:, 1] = popular - popular % 2, popular - popular % 2 + 1
    elif skew == "dropped":
        ids[::2] = -1
    return given, counts


def part_of(given, counts, rank, ranks):
    first = sum(counts[:rank])
    local = len(given["w2"]) // ranks
    own = {n: given[n][first : first + counts[rank]] for n in ("x", "topk_ids", "topk_weights")}
    weights = ("w13", "w2", "b13", "b2")
    return own | {n: given[n][rank * local : (rank + 1) * local] for n in weights}


def open_exchange(folder, rank, ranks, *, capacity=None, most=5, training=False):
    config = OneSidedConfig(
        ranks=ranks,
        experts=2 * ranks,
        hidden=HIDDEN,
        intermediate=INNER,
        top_k=TOP_K,
        max_tokens=most,
        dtype=torch.float32,
        capacity=capacity,
        training=training,
        debug=True,
    )
    return OneSidedGroup.between_processes(config, folder, rank=rank, timeout_s=TIMEOUT_S)


def play(folder, rank, ranks, *, epochs, capacity=None, most=5, stir_s=0.02):
    """Launch after launch without a barrier; every rank looks at its own results."""
    exchange = open_exchange(folder, rank, ranks, capacity=capacity, most=most)
    stir = random.Random(rank)  # noqa: S311 - a test
    worst, routed = 0.0, 0
    for epoch in range(epochs):
        given, counts = inputs(ranks, epoch, most=most)
        own = part_of(given, counts, rank, ranks)
        time.sleep(stir.random() * stir_s)  # ranks come early and late
        found = exchange.fused_moe(backend="fused", **own)
        assert bool(torch.isfinite(found).all()), epoch
        wanted = expected(given | {n: own[n] for n in ("x", "topk_ids", "topk_weights")}, "swiglu")
        if bool(wanted.any()):
            worst = max(worst, relative(found, wanted))
        else:
            assert not bool(found.any()), epoch
        routed += int((own["topk_ids"] >= 0).sum())
    sent = exchange.statistics()["sent_bytes"][0]
    return {
        "error": worst,
        "epochs": exchange.epoch,
        "sent_bytes": sum(sent),
        "formula_bytes": routed * HIDDEN * 4,
    }


def train(folder, rank, ranks, *, backend, epochs):
    """Forward and backward over real processes, against one process with all tokens."""
    group = open_exchange(folder, rank, ranks, training=True)
    experts = slice(2 * rank, 2 * rank + 2)
    worst = 0.0
    for epoch in range(epochs):
        given, counts = inputs(ranks, epoch + 10, most=5)
        own = part_of(given, counts, rank, ranks)
        tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        # The same function of all outputs: each rank weighs its own tokens' as the whole does.
        scale = torch.linspace(0.5, 1.5, max(1, sum(counts)))[: sum(counts)].unsqueeze(1)
        found, slopes = with_gradients(own, scale[tokens], group=group, backend=backend)
        wanted, right = with_gradients(given, scale)
        pairs = [(found, wanted[tokens])]
        for name, slope in slopes.items():
            of_token = name in {"x", "topk_weights"}
            pairs.append((slope, right[name][tokens if of_token else experts]))
        for one, other in pairs:
            assert one.shape == other.shape
            assert bool(torch.isfinite(one).all())
            worst = max(worst, float((one - other).abs().max()) if one.numel() else 0.0)
    return {"error": worst, "epochs": group.epoch}


def train_a_layer(folder, rank, ranks):
    """A layer with its losses, then a peer that leaves between forward and backward."""
    torch.manual_seed(3)
    sizes = {"hidden": HIDDEN, "intermediate": INNER, "experts": 2 * ranks}
    config = MoEConfig(**sizes, router=Router(top_k=TOP_K), shared_intermediate=4)
    whole = MoE(config)
    group = open_exchange(folder, rank, ranks, training=True)
    mine = MoE(config, group)
    here = group.experts_of(2 * ranks)
    shares = {
        name: tensor[here.start : here.stop] if name.startswith("experts.") else tensor
        for name, tensor in whole.state_dict().items()
    }
    mine.load_state_dict(shares)
    parts = torch.randn(5 + 2, HIDDEN).split([5, 2])
    output = mine(parts[rank])
    for part in parts:
        whole(part).square().sum().backward()
    loads = [int(part.sum()) for part in (mine.last_load.routed, whole.last_load.routed)]
    output.square().sum().backward()
    right = {n: p.grad for n, p in whole.named_parameters()}
    worst = max(
        relative(p.grad, right[n][here.start : here.stop].double())
        for n, p in mine.named_parameters()
        if n.startswith("experts.")
    )
    output = mine(parts[rank])
    if rank == 1:
        return {"error": worst, "loads": loads}
    group.timeout_s = 1.0
    began = time.monotonic()
    try:
        output.sum().backward()
        refused = "nothing"
    except CommunicationError as error:
        refused = str(error)
    waited_s = time.monotonic() - began
    return {"error": worst, "loads": loads, "refused": refused, "waited_s": waited_s}


def die(folder, rank, ranks):
    """The last rank is gone in the middle of its second launch; the others say so, and when."""
    exchange = open_exchange(folder, rank, ranks)
    given = operands((3, HIDDEN, INNER, 2 * ranks, TOP_K), bias=True, dtype=torch.float32)
    given["topk_ids"][:] = torch.tensor([0, 2 * ranks - 1])  # the last rank's expert among them
    own = part_of(given, [3, *[0] * (ranks - 1)], 0, ranks) | {
        n: part_of(given, [3], rank, ranks)[n] if rank == 0 else given[n][rank * 2 : rank * 2 + 2]
        for n in ("w13", "w2", "b13", "b2")
    }
    exchange.fused_moe(backend="fused", **own)  # ranks may come late to this one
    exchange.timeout_s = DEAD_S
    if rank == ranks - 1:
        threading.Timer(0.2, os._exit, [9]).start()  # it waits for the others' counts by then
    else:
        time.sleep(1.0)
    began = time.monotonic()
    try:
        exchange.fused_moe(backend="fused", **own)
    except CommunicationError as error:
        return {"refused": str(error), "waited_s": time.monotonic() - began}
    return {"refused": "nothing"}


def scenes(folder, rank):
    for ranks in (2, 3, 4):
        for capacity in (None, 5):
            if rank < ranks:
                name = f"{ranks} ranks, {'compact' if capacity is None else 'capacity'}"
                place = folder / name
                epochs = {2: 5, 3: 3, 4: 2}[ranks]
                yield (
                    name,
                    lambda p=place, r=ranks, c=capacity, e=epochs: play(
                        p, rank, r, epochs=e, capacity=c
                    ),
                )
    for ranks, backend in ((2, "fused"), (3, "reference"), (4, "reference")):
        if rank < ranks:
            name = f"{ranks} ranks train, {backend}"
            yield (
                name,
                lambda n=name, r=ranks, b=backend: train(
                    folder / n, rank, r, backend=b, epochs=1 if r == 2 else 2
                ),
            )
    if rank < 2:
        yield "a layer", lambda: train_a_layer(folder / "a layer", rank, 2)
    yield "a rank that never comes", lambda: never_comes(folder / "a rank that never comes", rank)
    yield "sizes that differ", lambda: differing(folder / "sizes that differ", rank)
    yield "a rank dies", lambda: die(folder / "a rank dies", rank, 4)


def never_comes(folder, rank):
    if rank != 0:
        return {"refused": "not asked"}
    try:
        SharedMemoryHeap(folder, rank=0, ranks=2, nbytes=64, timeout_s=0.1)
    except CommunicationError as error:
        return {"refused": str(error)}
    return {"refused": "nothing"}


def differing(folder, rank):
    if rank > 1:
        return {"refused": "not asked"}
    try:
        SharedMemoryHeap(folder, rank=rank, ranks=2, nbytes=64, tag=str(rank), timeout_s=TIMEOUT_S)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": "nothing"}


def stress(folder, rank):
    launches = int(sys.argv[2])
    capacity = 3 if "capacity" in sys.argv else None
    options = {"epochs": launches, "capacity": capacity, "most": 3, "stir_s": 0.002}
    yield "stress", lambda: play(folder / "stress", rank, 2, **options)


def be(folder, rank):
    """Play the scenes of a rank, and write one line of JSON for each."""
    for name, scene in (stress if len(sys.argv) > 2 else scenes)(folder, rank):
        (folder / name).mkdir(exist_ok=True)
        began, cpu = time.monotonic(), time.process_time()
        try:
            result = scene()
        except Exception:  # noqa: BLE001 - the parent shows it
            result = {"failed": traceback.format_exc()}
        result |= {
            "scene": name,
            "rank": rank,
            "wall_s": round(time.monotonic() - began, 2),
            "cpu_s": round(time.process_time() - cpu, 2),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def forked(folder, rank):
    """Be a rank in a process of its own, whose lines go to a file."""
    pid = os.fork()
    if pid:
        return pid
    with (folder / f"{rank}.jsonl").open("w") as sys.stdout:
        be(folder, rank)
    os._exit(0)


def main():
    folder = Path(sys.argv[1])
    ranks = range(2 if len(sys.argv) > 2 else 4)
    processes = [forked(folder, rank) for rank in ranks]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    for rank in ranks:
        sys.stdout.write((folder / f"{rank}.jsonl").read_text())
    sys.stdout.write(json.dumps({"codes": codes}) + "\n")


if __name__ == "__main__":
    main()
