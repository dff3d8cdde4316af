"""Memory of the outer state, counted and measured, against the formula."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, DelayCorrected, EagerDiLoCo, LocalSGD, OuterSync, outer_state_bytes
from fivefold.testing import run_processes, run_world

SIZE = 1600
NUM_PARAMETERS = SIZE * SIZE
CASES = [
    (CO2(tau=1), "fp32", 1, 12),
    (LocalSGD(tau=1), "fp32", 1, 8),
    (DelayCorrected(tau=1, fragments=1), "fp32", 1, 12),
    (EagerDiLoCo(tau=1), "fp32", 1, 24),
    (CO2(tau=1), "int8", 1, 18),
    (CO2(tau=1), "fp32", 2, 6),
]


def resident_bytes():
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed, and is only kept for reuse
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def counted_bytes(tree):
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    values = tree.values() if isinstance(tree, dict) else ()
    return sum(counted_bytes(value) for value in values)


@pytest.mark.distributed
@pytest.mark.parametrize(("rule", "codec", "shards", "per_parameter"), CASES)
def test_measured_memory_is_the_formula(rule, codec, shards, per_parameter):
    def work(_):
        mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Linear(SIZE, SIZE, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = resident_bytes()
        sync = OuterSync(
            model,
            optimizer,
            rule=rule,
            codec=codec,
            process_group=mesh["replicate"],
            shard_group=mesh["shard"] if shards > 1 else None,
        )
        for _ in range(3):
            sync.step()
        sync.finalize()
        grown = resident_bytes() - before
        return counted_bytes(sync.state_dict()), grown

    expected = outer_state_bytes(
        rule, NUM_PARAMETERS, num_workers=2, num_shards=shards, codec=codec
    )
    assert expected == per_parameter * NUM_PARAMETERS
    for counted, grown in run_processes(2 * shards, work):
        assert counted == pytest.approx(expected, rel=0.01)
        # Beside the state: buckets and wires of fixed sizes, and libraries at their first use. It
        # may grow by less: what the tests before have freed is used first.
        assert grown < expected + 25e6


def test_numbers_must_be_positive():
    with pytest.raises(ConfigurationError, match="num_shards must be a whole number from 1; got 0"):
        outer_state_bytes(CO2(tau=1), 10, num_shards=0)


def test_residuals_are_shared_by_the_workers():
    """12 bytes of CO2, 4 of the rank's own residual and 4 of all workers' together."""
    assert outer_state_bytes(CO2(tau=1), 100, num_workers=4, codec="int8") == 1700


def test_a_world_in_memory_forgets_what_all_have_taken():
    """A long study in one process would otherwise keep every payload that was ever sent."""
    size = 12_345

    def work(transport):
        for _ in range(20):
            payload = torch.ones(size)
            pending = transport.launch([payload], metadata=torch.zeros(1), fragment=0, what="sum")
            pending.wait()
            pending.wait()  # does nothing more
            assert float(payload[0]) == 3.0
        held = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(each.numel() == size for each in held)

    assert max(run_world(3, work)) < 20
