import itertools
import math

import pytest
import torch

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.optim import (
    CO2,
    AutoTau,
    DelayCorrected,
    DelayedGradients,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    OuterOptimizer,
    OverlapLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from fivefold.runs.ranks import Ranks, open_ranks, read_place
from fivefold.testing import run_processes
from fivefold.train._loop import make_method
from fivefold.train._methods import method_label
from fivefold.train._spans import Span, SpanRecorder, subtract
from fivefold.train._step import bits_per_byte
from fivefold.train.config import AutoTauConfig, SyncConfig


class Regression(torch.nn.Module):
    """A small model in float64; large enough for two DDP buckets."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(20, 3000, generator=generator).double() / 9)
        self.second = torch.nn.Parameter(torch.randn(3000, 100, generator=generator).double() / 9)

    def loss(self, inputs, targets):
        return (torch.tanh(inputs @ self.first) @ self.second - targets).square().mean()


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    make = torch.randn(4, 120, generator=generator, dtype=torch.float64)
    return make[:, :20], make[:, 20:]


def build(method, **keys):
    world = open_ranks(device="cpu", timeout_s=20.0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    keys = keys if method in {"none", "ddp", "delayed_gradients"} else {"tau": 3} | keys
    config = SyncConfig(method=method, **keys)
    return model, optimizer, make_method(config, model, optimizer=optimizer, ranks=world)


def run_method(method, *, steps=5, accumulation=1, **keys):
    def work(rank):
        model, optimizer, made = build(method, **keys)
        made.warm_up(*data(rank, 99))
        spans = []
        for step in range(steps):
            for part in range(accumulation):
                batch = data(rank, step * accumulation + part)
                if part < accumulation - 1:
                    with made.accumulating():
                        made.backward(made.loss(*batch) / accumulation)
                else:
                    made.backward(made.loss(*batch) / accumulation)
            optimizer.step()
            optimizer.zero_grad()
            made.after_step()
            spans += made.take_spans()
        made.finalize()
        spans += made.take_spans()
        return [p.detach().clone() for p in model.parameters()], spans, made.totals.record()

    return run_processes(2, work)


def by_hand(*, steps=5, accumulation=1, ranks=(0, 1)):
    """One process: gradients of all ranks' batches averaged, momentum SGD written out."""

    def work(_rank):
        model = Regression()
        parameters = list(model.parameters())
        velocity = [torch.zeros_like(p) for p in parameters]
        for step in range(steps):
            losses = [
                model.loss(*data(rank, step * accumulation + part))
                for rank in ranks
                for part in range(accumulation)
            ]
            gradients = torch.autograd.grad(sum(losses) / len(losses), parameters)
            with torch.no_grad():
                for parameter, speed, gradient in zip(parameters, velocity, gradients, strict=True):
                    speed.mul_(0.9).add_(gradient)
                    parameter.sub_(0.05 * speed)
        return [p.detach().clone() for p in parameters]

    return run_processes(1, work)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_is_large_batch_training_in_float64(accumulation):
    expected = by_hand(accumulation=accumulation)
    for found, _, totals in run_method("ddp", accumulation=accumulation):
        for left, right in zip(found, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
        # Once per optimizer step, however many micro-batches; the warm-up does not count.
        assert totals["payload_bytes"] == 5 * 8 * (20 * 3000 + 3000 * 100)


@pytest.mark.distributed
@pytest.mark.parametrize(("codec", "bits"), [("bf16", 8), ("fp16", 11)])
def test_ddp_in_half_precision_sends_half_and_rounds_as_the_type_does(codec, bits):
    for found, _, totals in run_method("ddp", steps=1, codec=codec):
        start = Regression()
        for left, right, old in zip(found, by_hand(steps=1), start.parameters(), strict=True):
            # Two addends and their sum are rounded; the step is 0.05 times the gradient.
            largest = (right - old).abs().max()
            assert 0 < (left - right).abs().max() <= 2 * 2.0**-bits * largest
        assert totals["payload_bytes"] == 8 * (20 * 3000 + 3000 * 100)
        assert totals["sent_bytes"] == totals["payload_bytes"] // 4  # float64 to 2 bytes; 2 ranks


@pytest.mark.distributed
def test_none_leaves_every_rank_on_its_own():
    for rank, (found, spans, totals) in enumerate(run_method("none")):
        for left, right in zip(found, by_hand(ranks=(rank,)), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
        assert spans == []
        assert totals["collectives"] == 0


@pytest.mark.distributed
def test_local_sgd_is_the_average_after_every_round():
    def reference(_rank):
        models = [Regression() for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
        for step in range(5):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                model.loss(*data(rank, step)).backward()
                optimizer.step()
            if step in {2, 4}:  # the end of a round of 3, and of training
                with torch.no_grad():
                    for pair in zip(*(m.parameters() for m in models), strict=True):
                        mean = (pair[0] + pair[1]) / 2
                        for parameter in pair:
                            parameter.copy_(mean)
        return [p.detach().clone() for p in models[0].parameters()]

    (expected,) = run_processes(1, reference)
    for found, _, _ in run_method("local_sgd"):
        for left, right in zip(found, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "method", ["ddp", "local_sgd", "slowmo", "co2", "streaming_diloco", "delayed_gradients"]
)
def test_spans_and_totals_tell_one_story(method):
    keys = {"fragments": 2} if method == "streaming_diloco" else {}
    for _, spans, totals in run_method(method, **keys):
        all_reduces = [span for span in spans if span.lane == "in_flight"]
        waits = [span for span in spans if span.lane == "wait"]
        assert len(all_reduces) == totals["collectives"] > 0
        # Buckets of DDP travel at the same time: count each moment with any of them once. The
        # all_reduces of fragments are summed: each has its own wait.
        moments = sorted({t for span in all_reduces for t in (span.start_s, span.end_s)})
        in_flight_s = sum(
            end - start
            for start, end in itertools.pairwise(moments)
            if any(span.start_s <= start and end <= span.end_s for span in all_reduces)
        )
        if method == "streaming_diloco":
            in_flight_s = sum(span.end_s - span.start_s for span in all_reduces)
            assert any("fragment 1" in span.name for span in all_reduces)
        exposed_s = sum(span.end_s - span.start_s for span in waits)
        assert math.isclose(in_flight_s, totals["in_flight_s"], rel_tol=1e-9)
        assert math.isclose(exposed_s, totals["exposed_wait_s"], rel_tol=1e-9)
        assert 0 <= totals["overlap_fraction"] <= 1
        # What occupies the training thread never overlaps.
        busy = sorted(
            (span for span in spans if span.lane != "in_flight"), key=lambda span: span.start_s
        )
        for before, after in itertools.pairwise(busy):
            assert before.end_s <= after.start_s + 1e-9


@pytest.mark.distributed
def test_evaluation_sees_equal_parameters_and_gives_the_local_ones_back():
    def work(rank):
        model, optimizer, made = build("co2")
        for step in range(4):
            made.backward(made.loss(*data(rank, step)))
            optimizer.step()
            optimizer.zero_grad()
            made.after_step()
        local = [p.detach().clone() for p in model.parameters()]
        with made.evaluation():
            judged = [p.detach().clone() for p in model.parameters()]
        back = all(torch.equal(a, b) for a, b in zip(local, model.parameters(), strict=True))
        return local, judged, back

    (local0, judged0, back0), (local1, judged1, back1) = run_processes(2, work)
    assert back0
    assert back1
    assert all(torch.equal(a, b) for a, b in zip(judged0, judged1, strict=True))
    assert not torch.equal(local0[0], local1[0])


HIDDEN = ("co2", "delay_corrected", "overlap_local_sgd", "eager_diloco")
RULES = {
    "local_sgd": LocalSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "co2": CO2,
    "delay_corrected": DelayCorrected,
    "overlap_local_sgd": OverlapLocalSGD,
    "eager_diloco": EagerDiLoCo,
    "streaming_diloco": StreamingDiLoCo,
    "delayed_gradients": DelayedGradients,
}


@pytest.mark.parametrize("method", RULES)
def test_a_method_without_settings_is_its_rule_without_settings(method):
    tau = {} if method == "delayed_gradients" else {"tau": 5}
    assert SyncConfig(method=method, **tau).rule() == RULES[method](**tau)


def test_settings_reach_the_rule():
    config = SyncConfig(method="co2", tau=5, outer_lr=0.3, outer_momentum=0.1, clip=math.inf)
    assert config.rule() == CO2(tau=5, outer_lr=0.3, outer_momentum=0.1, clip=None)
    config = SyncConfig(method="slowmo", tau=5, outer_lr=0.3, clip=2.0, units="delta")
    assert config.rule() == SlowMo(tau=5, outer_lr=0.3, clip=2.0, units="delta")
    config = SyncConfig(method="overlap_local_sgd", tau=5, pull=0.4)
    assert config.rule() == OverlapLocalSGD(tau=5, pull=0.4)
    config = SyncConfig(method="streaming_diloco", tau=6, fragments=3, delay_steps=2, keep=0.2)
    assert config.rule() == StreamingDiLoCo(tau=6, fragments=3, delay_steps=2, keep=0.2)


@pytest.mark.parametrize("method", HIDDEN)
def test_an_automatic_tau_has_the_table_that_was_given(method):
    config = SyncConfig(method=method, tau="auto", auto_tau=AutoTauConfig(maximum=64, margin=1.5))
    assert config.rule().tau == AutoTau(maximum=64, margin=1.5)
    assert SyncConfig(method=method, tau="auto").rule() == RULES[method](tau="auto")


def test_any_optimizer_of_torch_is_an_outer_optimizer():
    sgd = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    rule = SyncConfig(method="outer_optimizer", tau=5).rule()
    assert rule == OuterOptimizer(tau=5, optimizer=torch.optim.SGD, options=sgd)
    config = SyncConfig(
        method="outer_optimizer", tau=5, optimizer="AdamW", options={"lr": 0.1}, hidden=True
    )
    assert config.rule() == OuterOptimizer(
        tau=5, optimizer=torch.optim.AdamW, options={"lr": 0.1}, hidden=True
    )
    for name in ("Adamw", "Optimizer", "lr_scheduler"):
        with pytest.raises(ConfigurationError, match="not an optimizer of") as caught:
            SyncConfig(method="outer_optimizer", optimizer=name).rule()
        assert "AdamW" in caught.value.hint
        assert name != "Adamw" or "did you mean AdamW?" in caught.value.hint
    with pytest.raises(ConfigurationError, match="refuses options"):
        SyncConfig(method="outer_optimizer", options={"lr": -1.0}).rule()


def test_labels():
    def label(method, **keys):
        return method_label(SyncConfig(method=method, **keys))

    assert label("ddp") == "DDP"
    assert label("ddp", codec="bf16") == "DDP (bf16)"
    assert label("co2", tau=8) == "CO2 (tau 8)"
    assert label("co2", tau="auto", codec="int8") == "CO2 (tau auto, int8)"
    assert label("streaming_diloco", fragments=4) == "Streaming DiLoCo (tau 8, 4 fragments)"
    assert label("outer_optimizer", optimizer="AdamW") == "outer AdamW (tau 8)"
    assert label("outer_optimizer", hidden=True) == "hidden outer SGD (tau 8)"


def test_bits_per_byte_of_a_uniform_guess():
    # 256 equally likely bytes cost 8 bits each; a token of 4 bytes spreads its nats over them.
    assert math.isclose(bits_per_byte(math.log(256), num_tokens=50, num_bytes=50), 8.0)
    assert math.isclose(bits_per_byte(math.log(2**16), num_tokens=50, num_bytes=200), 4.0)


def hole(start_s, end_s):
    return Span(lane="wait", name="w", start_s=start_s, end_s=end_s)


def test_subtracting_holes_keeps_the_rest():
    assert subtract(0.0, 10.0, holes=[]) == [(0.0, 10.0)]
    assert subtract(0.0, 10.0, holes=[hole(8.0, 10.0), hole(2.0, 3.0)]) == [(0, 2), (3, 8)]
    assert subtract(0.0, 10.0, holes=[hole(0.0, 4.0), hole(3.0, 5.0)]) == [(5.0, 10.0)]
    assert subtract(0.0, 10.0, holes=[hole(0.0, 10.0)]) == []


def test_recorder_sums_lanes_and_leaves_all_reduces_out(tmp_path):
    recorder = SpanRecorder(tmp_path / "rank0.jsonl", seconds={"data": 1.5})
    recorder.add([hole(0.0, 2.0), Span(lane="in_flight", name="f", start_s=0.0, end_s=9.0)])
    seconds = recorder.categories(10.0)
    recorder.close()
    assert seconds["exposed_communication"] == 2.0
    assert seconds["data"] == 1.5
    assert seconds["other"] == 6.5


def raise_under_guard(error):
    with Ranks(world_size=2, where="step 7").guard("the sum"):
        raise error


def test_only_runtime_errors_under_a_guard_become_communication_errors():
    with pytest.raises(CommunicationError, match=r"rank 0 of 2, step 7: the sum failed: reset"):
        raise_under_guard(RuntimeError("reset"))
    with pytest.raises(KeyError):  # a bug stays a bug
        raise_under_guard(KeyError("x"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 is outside 0\.\.1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', not a number"),
    ],
)
def test_a_broken_environment_is_named(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if "MASTER_ADDR" not in message:
        environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        read_place()
