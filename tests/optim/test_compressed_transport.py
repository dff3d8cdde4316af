"""Compressed sums over real processes: bits, bytes, order and resume."""

import copy
import json
import math
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fivefold.errors import ConfigurationError
from fivefold.lab import LabSpec, probe_capabilities, run_lab
from fivefold.optim import LocalSGD, OuterSync
from fivefold.optim._compressed import ring_bytes, slice_bounds
from fivefold.optim.codecs import BlockCodec, named_codec
from fivefold.optim.transport import ProcessGroupTransport
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed

LOSSY = ["bf16", "fp16", "int8", "int4", "topk"]
SIZES = [0, 1, 7, 255, 1000, 4099]
BUCKET_BYTES = 4096  # 1024 elements, so that some payloads have one bucket and some have five


def inputs(rank, turn, size):
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * turn + size)
    return torch.randn(size, generator=generator) * 10.0 ** (turn % 7 - 5)


def metadata_of(rank, turn):
    return torch.tensor([rank + 0.1, 1e-9 * turn, 2.0**40 + rank], dtype=torch.float64)


class Stream:
    """One transport whose fragment k has payloads of ``sizes[k]``."""

    def __init__(self, codec, sizes, *, group=None, bucket_bytes=BUCKET_BYTES, timeout_s=30.0):
        self.transport = ProcessGroupTransport(
            group, timeout_s=timeout_s, codec=codec, bucket_bytes=bucket_bytes
        )
        self.sizes = sizes
        for fragment, members in enumerate(sizes):
            payloads = [torch.empty(size) for size in members]
            self.transport.prepare(payloads, fragment=fragment)

    def launch(self, turn, *, fragment=0):
        rank = self.transport.rank
        payloads = [inputs(rank, turn, size) for size in self.sizes[fragment]]
        metadata = metadata_of(rank, turn)
        all_reduce = self.transport.launch(
            payloads,
            metadata=metadata,
            fragment=fragment,
            what=f"turn {turn} of fragment {fragment}",
        )
        return all_reduce, payloads, metadata

    def turn(self, turn, *, fragment=0):
        all_reduce, payloads, metadata = self.launch(turn, fragment=fragment)
        assert all_reduce.wait() is True
        assert all_reduce.completed_at_s >= all_reduce.launched_at_s
        return [*payloads, metadata]


class Reference:
    """The sum as it is defined: a loop over ranks, whole payloads, no slices and no buckets."""

    def __init__(self, codec, world_size, size):
        self.codec = codec
        self.residuals = [torch.zeros(size) for _ in range(world_size)]
        self.owned = torch.zeros(size)

    def turn(self, contributions):
        size = self.owned.numel()
        total = self.owned.clone()
        for rank, values in enumerate(contributions):
            wanted = self.residuals[rank] + values
            message = self.codec.decode(self.codec.encode(wanted), size)
            self.residuals[rank] = wanted - message
            total = total + message
        result = self.codec.decode(self.codec.encode(total), size)
        self.owned = total - result
        return result


# -- the bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_sums_are_the_references_bit_for_bit(name, world_size):
    turns = 5

    def work(_rank):
        stream = Stream(name, [[size] for size in SIZES])
        return [
            [stream.turn(turn, fragment=index) for turn in range(turns)]
            for index in range(len(SIZES))
        ]

    results = run_processes(world_size, work)
    for index, size in enumerate(SIZES):
        reference = Reference(named_codec(name), world_size, size)
        for turn in range(turns):
            expected = reference.turn([inputs(rank, turn, size) for rank in range(world_size)])
            for rank in range(world_size):
                payload, metadata = results[rank][index][turn]
                assert torch.equal(payload, expected), (size, turn, rank)
                assert torch.equal(metadata, results[0][index][turn][1])
                exact = sum(metadata_of(other, turn) for other in range(world_size))
                torch.testing.assert_close(metadata, exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("bucket_bytes", [64, 2048, 4100, 2**25])
def test_buckets_change_no_bit(bucket_bytes):
    codec = BlockCodec(bits=8, block=16)

    def work(_rank):
        stream = Stream(codec, [[3000, 17]], bucket_bytes=bucket_bytes)
        return [stream.turn(turn) for turn in range(3)]

    results = run_processes(3, work)
    for index, size in enumerate([3000, 17]):
        reference = Reference(codec, 3, size)
        for turn in range(3):
            expected = reference.turn([inputs(rank, turn, size) for rank in range(3)])
            assert all(torch.equal(result[turn][index], expected) for result in results)


@pytest.mark.parametrize("name", LOSSY)
def test_results_and_residuals_telescope_to_the_inputs(name):
    turns, size, world_size = 120, 515, 3

    def work(rank):
        stream = Stream(name, [[size]])
        received = torch.zeros(size, dtype=torch.float64)
        sent = torch.zeros(size, dtype=torch.float64)
        for turn in range(turns):
            payload = inputs(rank, turn, size) * 1e-3
            sent += payload
            metadata = torch.zeros(1, dtype=torch.float64)
            stream.transport.launch([payload], metadata=metadata, fragment=0, what="turn").wait()
            received += payload
        return sent, received, stream.transport.state_dict()

    results = run_processes(world_size, work)
    assert all(torch.equal(result[1], results[0][1]) for result in results)
    total = results[0][1].clone()
    owned = torch.cat([state["0"]["0"]["owned"] for _, _, state in results])
    total += owned + sum(state["0"]["0"]["sent"] for _, _, state in results)
    sent = sum(result[0] for result in results)
    largest = 10.0 * 5 * 1e-3 * world_size  # five standard deviations of the largest turns
    assert (total - sent).abs().max() <= turns * (world_size + 2) * largest * 2.0**-24


def test_resume_in_mid_stream_is_bit_exact():
    cut, turns = 3, 7

    def work(_rank):
        whole = Stream("int4", [[700], [300, 41]])
        saved = None
        for turn in range(turns):
            if turn == cut:
                saved = copy.deepcopy(whole.transport.state_dict())
            expected = [whole.turn(turn, fragment=k) for k in (0, 1)]
        resumed = Stream("int4", [[700], [300, 41]])
        before = resumed.transport.state_dict()
        resumed.transport.load_state_dict(saved)
        for turn in range(cut, turns):
            ours = [resumed.turn(turn, fragment=k) for k in (0, 1)]
        same = all(
            torch.equal(a, b)
            for one, other in zip(ours, expected, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        shapes = [
            {k: {i: {n: t.shape for n, t in p.items()} for i, p in v.items()} for k, v in d.items()}
            for d in (before, saved)
        ]
        return same, shapes[0] == shapes[1], before["1"]["1"]["sent"].numel()

    assert run_processes(3, work) == [(True, True, 41)] * 3


def test_fragments_in_flight_together_and_collectives_between_them():
    def work(rank):
        apart, together = Stream("int8", [[900], [1300]]), Stream("int8", [[900], [1300]])
        fine = []
        for turn in range(4):
            expected = [apart.turn(turn, fragment=k) for k in (0, 1)]
            all_reduces = [together.launch(turn, fragment=k) for k in (0, 1)]
            ranks = together.transport.gather_objects(rank)
            first = torch.tensor([float(rank + turn)])
            together.transport.broadcast([first])
            fine += [ranks == [0, 1, 2], first.item() == turn]
            for (all_reduce, payloads, metadata), values in zip(
                reversed(all_reduces), reversed(expected), strict=True
            ):
                all_reduce.wait()
                pairs = zip([*payloads, metadata], values, strict=True)
                fine += [torch.equal(ours, theirs) for ours, theirs in pairs]
        return all(fine)

    assert run_processes(3, work) == [True] * 3


def test_a_lost_number_spoils_its_own_round_only():
    def work(rank):
        stream = Stream("int8", [[600]])
        metadata = torch.zeros(1, dtype=torch.float64)
        outcomes = []
        for turn in range(3):
            payload = torch.ones(600)
            if rank == 1 and turn == 1:
                payload[300] = math.nan
            stream.transport.launch([payload], metadata=metadata, fragment=0, what="turn").wait()
            outcomes.append(torch.isfinite(payload))
        return (
            [bool(o.all()) for o in outcomes],
            bool(outcomes[1][300]),
            bool(outcomes[1][:256].all()),
        )

    assert run_processes(2, work) == [([True, False, True], False, True)] * 2


# -- the plain path -----------------------------------------------------------------------------


def test_tensors_longer_than_a_bucket_are_summed_to_the_last_element():
    """Ten elements a bucket; the sizes lie around its borders."""
    sizes = [0, 1, 9, 10, 11, 19, 20, 21, 25, 2, 6, 6, 3, 1000]

    def work(rank):
        transport = ProcessGroupTransport(None, timeout_s=30, bucket_bytes=40)
        payloads = [torch.arange(size, dtype=torch.float32) + rank for size in sizes]
        payloads.append(torch.arange(33, dtype=torch.float64) * (rank + 1))
        metadata = metadata_of(rank, 1)
        transport.prepare(payloads, fragment=0)
        all_reduce = transport.launch(payloads, metadata=metadata, fragment=0, what="sum")
        all_reduce.wait()
        num_bytes = sum(payload.nbytes for payload in payloads) + metadata.nbytes
        assert all_reduce.sent_bytes == ring_bytes(num_bytes, world_size=3)
        assert transport.state_dict() == {}
        return payloads

    for payloads in run_processes(3, work):
        for size, payload in zip(sizes, payloads, strict=False):
            assert torch.equal(payload, 3 * torch.arange(size, dtype=torch.float32) + 3)
        assert torch.equal(payloads[-1], 6 * torch.arange(33, dtype=torch.float64))


def test_a_device_mesh_names_the_ranks():
    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ConfigurationError, match="one dimension; got a mesh of 2"):
            ProcessGroupTransport(mesh, timeout_s=30)
        sums = []
        for codec in ("fp32", "int8"):
            transport = ProcessGroupTransport(mesh["replicate"], timeout_s=30, codec=codec)
            payload = torch.full((300,), 127.0 * (rank + 1))
            transport.prepare([payload], fragment=0)
            metadata = torch.tensor([1.0 + rank], dtype=torch.float64)
            transport.launch([payload], metadata=metadata, fragment=0, what="sum").wait()
            sums.append((payload.unique().tolist(), metadata.item()))
        return sums[0][0] == [127.0 * sums[0][1]], sums[1][1] == sums[0][1], transport.world_size

    assert run_processes(4, work) == [(True, True, 2)] * 4


# -- the bytes ----------------------------------------------------------------------------------


@given(
    size=st.integers(0, 10_000), world_size=st.integers(1, 9), granule=st.sampled_from([1, 16, 256])
)
def test_slices_cover_every_element_once(size, world_size, granule):
    bounds = slice_bounds(size, world_size=world_size, granule=granule)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, size, world_size)
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) < 2 * granule  # the last block may be short
    assert all(bound % granule == 0 or bound == size for bound in bounds)


@pytest.mark.parametrize("name", LOSSY)
def test_sent_bytes_are_those_handed_to_the_collectives(name):
    def work(rank):
        handed = []
        exchange, reduce = dist.all_to_all_single, dist.all_reduce

        def counted_exchange(output, given_, output_splits, input_splits, **more):
            assert sum(input_splits) == given_.nbytes
            assert sum(output_splits) == output.nbytes
            handed.append(given_.nbytes - input_splits[rank])
            return exchange(output, given_, output_splits, input_splits, **more)

        def counted_reduce(tensor, **more):
            handed.append(ring_bytes(tensor.nbytes, world_size=3))
            return reduce(tensor, **more)

        stream = Stream(name, [[size, 33] for size in SIZES])
        dist.all_to_all_single, dist.all_reduce = counted_exchange, counted_reduce
        rows = []
        for fragment in range(len(SIZES)):
            handed.clear()
            all_reduce, _, _ = stream.launch(1, fragment=fragment)
            all_reduce.wait()
            rows.append((all_reduce.sent_bytes, sum(handed)))
        return rows

    for rows in run_processes(3, work):
        assert all(promised == counted for promised, counted in rows)


def test_sent_bytes_of_equal_slices_have_a_closed_form():
    def work(_rank):
        stream = Stream("int8", [[4 * 1024]], bucket_bytes=4 * 1024)
        all_reduce, _, _ = stream.launch(0)
        all_reduce.wait()  # nobody leaves while a peer still needs this rank
        return all_reduce.sent_bytes

    metadata = ring_bytes(24, world_size=4)
    assert run_processes(4, work) == [2 * 3 * (4096 + 2 * 16) // 4 + metadata] * 4


COUNTING = """
import json
import torch, torch.distributed as dist
from fivefold.optim import ProcessGroupTransport

def sent():
    lines = [line.partition(":") for line in open("/proc/net/dev") if ":" in line]
    return {name.strip(): int(rest.split()[8]) for name, _, rest in lines}["eth0"]

dist.init_process_group("gloo")
rows = {}
for codec in ("fp32", "bf16", "int8", "int4", "topk"):
    transport = ProcessGroupTransport(None, timeout_s=60, codec=codec)
    payload = torch.randn(1_000_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    transport.prepare([payload], fragment=0)
    metadata = torch.zeros(3, dtype=torch.float64)
    dist.barrier()
    before = sent()
    all_reduce = transport.launch([payload], metadata=metadata, fragment=0, what="sum")
    all_reduce.wait()
    dist.barrier()
    rows[codec] = (all_reduce.sent_bytes, sent() - before)
if dist.get_rank() == 0:
    print(json.dumps(rows))
"""


@pytest.mark.lab
@pytest.mark.alone
def test_sent_bytes_are_those_that_the_kernel_counts(tmp_path):
    able = probe_capabilities()
    missing = [name for name in ("namespaces", "bridge", "veth", "tbf") if not able[name].works]
    if missing:
        pytest.skip("; ".join(f"{name}: {able[name].reason}" for name in missing))
    script = tmp_path / "count.py"
    script.write_text(COUNTING)
    spec = LabSpec(hosts=3, rate="1Gbit/s", mtu=60000)
    command = [sys.executable, str(script)]
    result = run_lab(spec, command, timeout_s=120, log_folder=tmp_path / "log", stream=False)
    assert result.exit_code == 0, result.ranks[0].stderr()[-2000:]
    for promised, counted in json.loads(result.ranks[0].stdout()).values():
        # Headers, acknowledgements and the barriers come on top, with 60,000 bytes a frame.
        assert promised <= counted <= 1.05 * promised + 20_000


# -- what is not allowed ------------------------------------------------------------------------


def test_bad_use_is_refused():
    def work(_rank):
        with pytest.raises(ConfigurationError, match="no codec named 'int3'"):
            ProcessGroupTransport(None, timeout_s=30, codec="int3")
        with pytest.raises(ConfigurationError, match="codec must be a name or a codec"):
            ProcessGroupTransport(None, timeout_s=30, codec=BlockCodec)
        with pytest.raises(ConfigurationError, match="bucket_bytes must be a whole number"):
            ProcessGroupTransport(None, timeout_s=30, bucket_bytes=0)
        stream = Stream("int8", [[300]])
        metadata = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(ConfigurationError, match="flat contiguous float32"):
            stream.transport.prepare([torch.zeros(3, dtype=torch.float64)], fragment=1)
        with pytest.raises(ConfigurationError, match="launched before prepare"):
            stream.transport.launch([torch.zeros(3)], metadata=metadata, fragment=1, what="sum")
        with pytest.raises(
            ConfigurationError, match=r"had payloads of \[300\] elements, now \[3\]"
        ):
            stream.transport.launch([torch.zeros(3)], metadata=metadata, fragment=0, what="sum")
        other = Stream("int8", [[301]])
        with pytest.raises(ConfigurationError, match="the saved residuals have sizes"):
            stream.transport.load_state_dict(other.transport.state_dict())
        plain = ProcessGroupTransport(None, timeout_s=30)
        with pytest.raises(ConfigurationError, match="has residuals of a codec"):
            plain.load_state_dict(stream.transport.state_dict())
        with pytest.raises(ConfigurationError, match="payloads must be contiguous"):
            ProcessGroupTransport(None, timeout_s=30, bucket_bytes=8).launch(
                [torch.zeros(4, 4).t()], metadata=metadata, fragment=0, what="sum"
            )
        return True

    assert run_processes(2, work) == [True, True]


TURNS = ["fp32", "int8", "int4", "fp32", "int4", "int8", "fp32"]


def switching(rank):
    """Every turn in another codec; from turn 4 on also on a transport that resumed there."""
    first = Stream("auto", [[4099, 7]])
    results, expected = [], []
    for turn, name in enumerate(TURNS):
        if turn == 4:
            state = copy.deepcopy(first.transport.state_dict())
        first.transport.use_codec(name)
        results.append(first.turn(turn)[:2])
        expected.append([inputs(rank, turn, size) for size in (4099, 7)])
    second = Stream("auto", [[4099, 7]])
    second.transport.load_state_dict(state)
    again = []
    for turn, name in list(enumerate(TURNS))[4:]:
        second.transport.use_codec(name)
        again.append(second.turn(turn)[:2])
    left = [float(p.abs().sum()) for part in first.transport.state_dict()["0"].values()
            for p in part.values()]  # fmt: skip
    return results, expected, again, left


def test_a_codec_may_change_between_launches_and_nothing_is_lost():
    found = run_processes(3, switching)
    for results, _, again, left in found:
        for turn, result in enumerate(results):
            assert all(map(torch.equal, result, found[0][0][turn]))
        for one, other in zip(results[4:], again, strict=True):
            assert all(map(torch.equal, one, other))
        assert left == [0.0] * 4  # the last turn is sent as it is, with all that was kept
    for index in range(2):
        arrived = sum(result[index].double() for result in found[0][0])
        sent = sum(given[index].double() for _, expected, *_ in found for given in expected)
        torch.testing.assert_close(arrived, sent, rtol=1e-5, atol=1e-4)


def test_a_transport_of_one_codec_takes_no_other_and_measures_its_own():
    def work(_):
        transport = ProcessGroupTransport(None, timeout_s=30.0, codec="int8")
        with pytest.raises(ConfigurationError, match="sends int8, and nothing else; got 'int4'"):
            transport.use_codec("int4")
        one = transport.measure_link(1 << 22, device=torch.device("cpu"))
        all_ = ProcessGroupTransport(None, timeout_s=30.0, codec="auto").measure_link(
            1 << 22, device=torch.device("cpu")
        )
        return one, all_

    (one, all_), other = run_processes(2, work)
    assert (one, all_) == other  # the same numbers on both ranks
    assert one.codecs == ("int8",)
    assert all_.codecs == ("fp32", "int8", "int4")
    assert min(*one.numbers(), *all_.fixed_s.values()) > 0


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_weights_that_are_taken_are_their_mean_and_what_was_lost_before_stays_out(codec):
    """Statistics that only a callback has changed count as weights too."""

    def work(rank):
        model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), codec=codec)
        for turn in range(3):
            model(inputs(rank, turn + 4, 1024).view(16, 64)).square().mean().backward()
            optimizer.step()
            sync.step()
        sync.finalize()
        with torch.no_grad():
            model[1].running_var.fill_(rank + 1.0)
        sync.take_weights()
        statistics = float(model[1].running_var.mean())
        theirs = [[inputs(r, 5, p.numel()).view_as(p) for p in model.parameters()] for r in (0, 1)]
        with torch.no_grad():
            for p, mine in zip(model.parameters(), theirs[rank], strict=True):
                p.copy_(mine)
        sync.take_weights()
        for p, one, two in zip(model.parameters(), *theirs, strict=True):
            torch.testing.assert_close(p.detach(), (one + two) / 2, rtol=0, atol=1e-6)
        kept = [float(t.abs().sum()) for t in leaves(sync.state_dict()["transport"])]
        sync.close()
        return statistics, sum(kept)

    def leaves(state):
        for value in state.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    assert run_processes(2, work) == [(1.5, 0.0)] * 2
