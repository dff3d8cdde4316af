"""The Gluon kernel's own source on a machine without a GPU, under random interleavings."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from gluon_machine import (
    Compiled,
    Descriptor,
    Machine,
    MisuseError,
    Pointer,
    SharedMemory,
    StuckError,
)
from moe_oracle import expected, operands, relative

from fivefold.moe._gluon import missing_gluon
from fivefold.moe._workspace import layout_for

if (missing_gluon(torch.device("cpu")) or "").find("written for triton") >= 0:
    pytest.skip("another triton than the kernel is written for", allow_module_level=True)

SMALL = {"BM": 4, "BN": 8, "BK": 4, "CHUNK": 8, "PART": 4, "READ": 2, "BT": 2, "BH": 4, "GROUP": 2}
RING = {"STAGES": 4, "AHEAD": 2, "SLOTS": 2}
REST = {"WEIGHTS_REGISTERS": 0, "ROWS_REGISTERS": 0, "SPIN_LIMIT": 0, "WEIGHT_ON_INPUT": False}
PLAIN = {"swiglu": "silu", "reglu": "relu", "relu": "relu", "silu": "silu"}


def power_of_two(number):
    return 1 << (number - 1).bit_length()


def buffers(given, constants, lag):
    tokens, hidden = given["x"].shape
    experts, _, inner = given["w2"].shape
    slots = given["topk_ids"].numel()
    layout = layout_for(
        num_tokens=tokens,
        hidden=hidden,
        intermediate=inner,
        num_experts=experts,
        top_k=given["topk_ids"].shape[1],
        dtype=torch.float32,
        tile_rows=constants["BM"],
        chunk_slots=constants["CHUNK"],
    )
    known = {
        name: np.full(count, np.nan if kind.is_floating_point else -1, str(kind).split(".")[1])
        for name, (_, count, kind) in layout.sections.items()
    }
    known["control"] = np.zeros(layout.control_words, np.int32)
    known["out"] = np.full(tokens * hidden, np.nan, np.float32)
    known |= {"ids": given["topk_ids"].numpy(), "weights": given["topk_weights"].numpy()}
    known |= {name: given[name].numpy() if name in given else None for name in ("x", "b13", "b2")}
    pointers = {n: v if v is None else Pointer(v.reshape(-1)) for n, v in known.items()}
    columns = constants["BN"] // (2 if constants["GATED"] else 1)
    tiles = {"w13": columns, "w2": constants["BN"]}
    for name, rows in tiles.items():
        matrix = given[name].numpy().reshape(-1, given[name].shape[2])
        pointers[name] = Descriptor(matrix, (rows, constants["BK"]))
    blocks = -(-tokens // constants["BT"])
    return pointers | {
        "num_tokens": tokens,
        "num_slots": slots,
        "num_chunks": layout.num_chunks,
        "max_tiles": layout.max_tiles,
        "max_lag": lag,
        "combine_columns": constants["BH"],
        "num_combines": blocks * -(-hidden // constants["BH"]),
    }


def launched(given, *, seed, programs=2, activation="swiglu", lag=1, replaced=None, **ring):
    from fivefold.moe._gluon_kernel import gluon_kernel

    top_k = given["topk_ids"].shape[1]
    experts, hidden, inner = given["w2"].shape
    constants = SMALL | RING | REST | ring
    constants |= {"H": hidden, "I": inner, "K": top_k, "KP": power_of_two(top_k), "E": experts}
    constants |= {"EP": power_of_two(experts), "GATED": activation in {"swiglu", "reglu"}}
    constants |= {"ACTIVATION": PLAIN[activation]}
    arguments = buffers(given, constants, lag) | constants
    machine = Machine(seed, programs)
    kernel = Compiled(machine, replaced)(gluon_kernel)
    chosen = [arguments[name] for name in gluon_kernel.arg_names]
    for program in range(programs):
        machine.start(lambda: kernel(*chosen), program)
    machine.run()
    assert not arguments["control"].memory.any()  # as the next launch wants it
    return torch.from_numpy(arguments["out"].memory).reshape(given["x"].shape)


def drawn(shape, activation="swiglu", *, bias=False, seed=0):
    return operands(shape, activation, bias=bias, dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_right_under_random_interleavings(seed):
    shape = [(7, 8, 12, 3, 2), (5, 4, 4, 4, 3), (9, 12, 4, 2, 1)][seed % 3]  # T, H, I, E, K
    given = drawn(shape, bias=seed % 2 == 0, seed=seed)
    found = launched(given, seed=seed, programs=1 + seed % 4, lag=1 + seed % 3)
    assert relative(found, expected(given, "swiglu")) < 2e-6


@pytest.mark.parametrize(("stages", "slots"), [(3, 1), (5, 3)])
def test_right_for_other_rings_and_without_a_gate(stages, slots):
    given = drawn((6, 8, 16, 3, 2), "relu", bias=True)
    ring = {"STAGES": stages, "AHEAD": stages - 2, "SLOTS": slots}
    found = launched(given, seed=stages, programs=3, activation="relu", **ring)
    assert relative(found, expected(given, "relu")) < 2e-6


def test_all_to_one_expert_and_dropped_ids():
    given = drawn((9, 8, 8, 4, 2))
    given["topk_ids"] = torch.tensor([[3, -1]]).repeat(9, 1)
    found = launched(given, seed=3, programs=3)
    assert relative(found, expected(given, "swiglu")) < 2e-6


@pytest.mark.parametrize("activation", ["silu", "reglu"])
def test_weight_on_the_input(activation):
    given = drawn((9, 8, 12, 3, 1), activation, bias=True)
    found = launched(given, seed=5, activation=activation, WEIGHT_ON_INPUT=True)
    assert relative(found, expected(given, activation, weight_on_input=True)) < 2e-6


def test_the_same_bits_for_all_grids_and_interleavings():
    given = drawn((7, 8, 8, 3, 2))
    first = launched(given, seed=0, programs=1)
    for seed in (1, 2, 3):
        assert torch.equal(launched(given, seed=seed, programs=1 + seed), first)


# What the machine must notice: faults in the protocol, one at a time.
def fault_parity(step, number):
    return step % number, 0


def fault_use(step, number):
    return step % number, ((step + 1) // number) & 1


@pytest.mark.parametrize("fault", [fault_parity, fault_use])
def test_a_wrong_parity_is_noticed(fault):
    given = drawn((7, 8, 8, 3, 2))
    with pytest.raises((StuckError, MisuseError)):
        launched(given, seed=1, programs=1, replaced={"place_of": fault})


def test_too_many_unsignalled_copies_hang():
    given = drawn((7, 32, 32, 3, 2))
    with pytest.raises(StuckError):
        launched(given, seed=1, programs=1, AHEAD=3)


def test_a_signal_without_a_fence_is_noticed():
    given = drawn((7, 8, 8, 3, 2))
    with pytest.raises(MisuseError, match="fence"):
        launched(given, seed=1, replaced={"fence_async_shared": lambda: None})


def test_a_stage_released_too_early_is_noticed(monkeypatch):
    """As if the wait for the product before had been forgotten."""
    wait = SharedMemory.warpgroup_mma_wait
    monkeypatch.setattr(
        SharedMemory,
        "warpgroup_mma_wait",
        lambda self, most, deps: deps[0] if most else wait(self, most, deps),
    )
    given = drawn((7, 32, 32, 3, 2))
    found = [launched(given, seed=seed) for seed in (0, 5)]
    wanted = expected(given, "swiglu")
    assert not all(relative(each, wanted) < 2e-6 for each in found)
