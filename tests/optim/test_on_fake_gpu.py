"""What a boundary asks of a GPU, counted without one: launches, waits of the host, room.

None of them grows with the number of parameters, and the room not with the largest of them.
``tests/gpu`` shows that a GPU then computes what a CPU does.
"""

from types import SimpleNamespace

import pytest
import torch

from fivefold import optim
from fivefold.optim import _flat
from fivefold.optim._elastic import ElasticAllReduce
from fivefold.optim._elastic_quorum import Ballot
from helpers.fake_gpu import OneOfTwo, fake_gpu, parameters_on_gpu

TAU = 2
RULES = {
    "co2": optim.CO2(tau=TAU),
    "co2, waits": optim.CO2(tau=TAU, staleness="none"),
    "corrected": optim.DelayCorrected(tau=TAU, fragments=1),
    "eager": optim.EagerDiLoCo(tau=TAU),
    "diloco": optim.DiLoCo(tau=TAU),
    "delayed gradients": optim.DelayedGradients(extrapolation=1.0),
}


def last_steps(rule, *shapes, dtype=torch.float32, counters=0, statistics=0, **options):
    """Return launches, waits and the largest fresh tensor's bytes of the last round's steps."""
    counts = []
    between, after = (options.pop(name, lambda _: None) for name in ("between", "after"))
    options = {"check_every_rounds": 0} | options
    with pytest.MonkeyPatch.context() as patch, fake_gpu(patch) as gpu:
        model = parameters_on_gpu(*shapes, dtype=dtype)
        for number in range(counters):
            counter = torch.empty(9, dtype=torch.int32, device="cuda")
            model.register_buffer(f"counter{number}", counter)
        for number in range(statistics):
            model.register_buffer(f"mean{number}", torch.empty(9, dtype=dtype, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = optim.OuterSync(model, optimizer, rule=rule, transport=OneOfTwo(), **options)
        for _ in range(3 * rule.tau):
            between(model)
            gpu.forget()
            gpu.log.clear()
            if rule.sends_gradients:
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                gpu.forget()
                for hook in [*optimizer._optimizer_step_pre_hooks.values()]:
                    hook(optimizer, (optimizer,), {})
            after(model)
            sync.step()
            waits = len(gpu.waits) + gpu.log.count("host waits for compute")
            counts.append((gpu.launches.total(), waits, gpu.largest_bytes))
    return counts[-rule.tau :]


@pytest.fixture(scope="module", autouse=True)
def _first_of_all():
    """Pay once for what torch imports for the first tensor without contents."""
    last_steps(RULES["co2"], (2,))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_small_tensors_are_merged_together_and_the_host_waits_once(rule):
    few = last_steps(rule, (8, 8), (8,))
    many = last_steps(rule, *(6 * [(8, 8), (8,)]))
    assert few[-1][:2] == many[-1][:2]
    launches, waits, _ = many[-1]
    assert launches <= 45
    assert waits == 1
    assert many[:-1] == (rule.tau - 1) * [(0, 0, 0)]  # between boundaries nothing at all


@pytest.mark.parametrize(("writes", "waits"), [("before", 1), ("after", 2)])
def test_delayed_gradients_wait_once_for_gradients_and_buffers(writes, waits):
    """A second time where a buffer was written behind the optimizer's step."""

    def forward(model):
        for buffer in model.buffers():
            buffer.add_(1.0)

    rule = RULES["delayed gradients"]
    late = forward if writes == "after" else lambda _: None
    *_, plain = last_steps(rule, (8, 8), (8,))
    *_, few = last_steps(rule, (8, 8), (8,), between=forward, after=late, statistics=1)
    *_, many = last_steps(rule, (8, 8), (8,), between=forward, after=late, statistics=6)
    assert [plain[1], few[1], many[1]] == [1, waits, waits]
    assert many[0] <= 70


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4000, 6300), torch.float32), ((4000, 6300), torch.bfloat16), ((6300, 4000), torch.float32)],
    ids=["fp32", "bf16", "transposed"],
)
def test_no_temporary_is_as_large_as_a_large_tensor(shape, dtype):
    def transpose(model):
        if shape[0] > shape[1] and model.p0.is_contiguous():
            model.p0.data = torch.empty(shape[::-1], dtype=dtype, device="cuda").t()

    rule = RULES["co2"]
    *_, (launches, waits, room) = last_steps(rule, shape, dtype=dtype, between=transpose)
    pieces = -(-4000 * 6300 // _flat._DEVICE_PIECE_ELEMENTS) + 1
    assert room <= 4 * _flat._DEVICE_PIECE_ELEMENTS
    assert launches <= 45 * pieces
    assert waits == 1


def test_a_hash_of_the_anchor_is_a_few_launches_and_one_wait():
    shapes = [(5000, 5000), (8, 8), (8,)]
    *_, plain = last_steps(RULES["co2"], *shapes)
    *_, hashed = last_steps(RULES["co2"], *shapes, check_every_rounds=1)
    assert hashed[1] - plain[1] == 1
    assert hashed[0] - plain[0] <= 40  # 25 million elements; it was 200
    assert hashed[2] <= 4 * _flat._DEVICE_PIECE_ELEMENTS


@pytest.mark.parametrize(
    ("what", "options"),
    [("frozen", {}), ("fixed", {"check_every_rounds": 1}), ("outliers", {"outlier_factor": 9.0})],
)
def test_what_is_looked_at_beside_the_payload_costs_one_wait_however_much_it_is(what, options):
    def freeze(model):
        for parameter in [*model.parameters()][:6]:
            parameter.requires_grad_(what != "frozen")

    shapes, every = 5 * [(8, 8), (8,)], options.get("check_every_rounds", 0)
    *_, plain = last_steps(RULES["co2"], *shapes, check_every_rounds=every)
    counters = 5 if what == "fixed" else 0
    *_, found = last_steps(RULES["co2"], *shapes, between=freeze, counters=counters, **options)
    assert found[1] - plain[1] == 1


def test_an_outer_state_in_the_hosts_memory_waits_for_each_stage_and_not_for_each_piece(
    monkeypatch,
):
    monkeypatch.setattr(_flat, "_DEVICE_PIECE_ELEMENTS", 8192)
    monkeypatch.setattr(_flat, "_CPU_PIECE_ELEMENTS", 2048)
    shapes = [(128, 128), *(6 * [(16, 16)])]  # two stages of the first, and one of the others
    *_, (launches, waits, room) = last_steps(RULES["co2"], *shapes, outer_device="cpu")
    assert waits == 3
    assert launches == 6  # to the host and back
    assert room == 0


def test_an_elastic_sum_waits_for_the_launch_and_the_steps_for_nothing(monkeypatch):
    """On the training's stream it would come behind steps that were queued later, and hold them."""
    with fake_gpu(monkeypatch) as gpu:
        group = SimpleNamespace(
            streams={},
            form=lambda *_, **__: None,
            sum_=lambda _: gpu.log.append(f"sum on {torch.cuda.current_stream().name}"),
        )
        services = SimpleNamespace(
            vote=lambda ballot, **_: gpu.log.append("voted") or ballot,
            timeout_s=5.0,
            quorum_timeout_s=5.0,
        )
        all_reduce = ElasticAllReduce(
            [torch.empty(3, device="cuda")],
            services=services,
            group=group,
            members=("a", "b"),
            ballot=Ballot(worker="a", capacity=2, settings="", store="", state="", history=""),
            adopt=lambda ballot: ballot.arrived,
            what="a sum",
        )
        all_reduce._thread.join(20)
        assert gpu.log == [
            "side waits for compute", "sum on side", "host waits for an event of side", "voted"
        ]  # fmt: skip
        assert all_reduce.wait()
        assert gpu.log[4:] == ["compute waits for side"]
