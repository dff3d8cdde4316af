"""What every outer rule must do, one table of rules times one list of checks."""

import copy
import dataclasses
import io
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    AutoTau,
    DelayCorrected,
    LocalSGD,
    OuterOptimizer,
    OuterSync,
    StreamingDiLoCo,
    _flat,
)
from fivefold.testing import run_world
from helpers.outer_world import (
    OF_GRADIENTS,
    OF_THEIR_OWN,
    RULES,
    SURVIVES_LOSSES,
    WAITS,
    WITH_ENDS,
    WITHOUT_LOSSES,
    Counter,
    Lossy,
    Tapped,
    Worker,
    all_equal,
    trained,
)
from oracles.outer_updates import reference_run

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def structure(state):
    """Keys, lengths, and shapes and types of tensors."""
    if isinstance(state, dict):
        return {key: structure(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [structure(value) for value in state]
    return (state.shape, state.dtype) if isinstance(state, torch.Tensor) else None


# -- the reference, with inner optimizers that have a state, in small pieces ----------------------

SIZE = 24  # four parameters of 6 elements: 1, 2 or 4 fragments are equal parts


def slope(worker, step, x):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    curvature = torch.linspace(0.2, 1.5, SIZE, dtype=torch.float64)
    centre = torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (worker + 1)
    return curvature * (x - centre) + 0.1 * torch.randn(SIZE, dtype=x.dtype, generator=generator)


def inner_optimizer(name, parameters):
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def with_tau(rule, tau):
    changes = {"tau": tau}
    if rule.num_fragments > 1:
        changes |= {"fragments": {1: 1, 2: 2, 5: 4}[tau], "delay_steps": min(tau, 2)}
    return dataclasses.replace(rule, **changes)


@pytest.mark.parametrize("inner", ["momentum", "adamw"])
@pytest.mark.parametrize(
    "name", sorted(RULES.keys() - {"co2-auto"} - OF_GRADIENTS - WITH_ENDS - OF_THEIR_OWN)
)
def test_equals_the_reference_with_stateful_inner_optimizers(name, inner, monkeypatch):
    monkeypatch.setattr(_flat, "_CPU_PIECE_ELEMENTS", 4)  # a parameter is larger than a piece
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for tau in (1, 2, 5):
        rule = with_tau(RULES[name], tau)
        steps = 6 * tau + tau // 2

        def engine(transport, rule=rule, steps=steps):
            parameters = torch.nn.ParameterList(part.clone() for part in start.split(6))
            optimizer = inner_optimizer(inner, parameters)
            sync = OuterSync(parameters, optimizer, rule=rule, transport=transport)
            for step in range(steps):
                flat = torch.cat([p.detach() for p in parameters])
                parts = slope(transport.rank, step, flat).split(6)
                for p, gradient in zip(parameters, parts, strict=True):
                    p.grad = gradient
                optimizer.step()
                sync.step()
            sync.finalize()
            return torch.cat([p.detach() for p in parameters])

        weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
        optimizers = [inner_optimizer(inner, [weight]) for weight in weights]

        def local_step(worker, step, x, weights=weights, optimizers=optimizers):
            with torch.no_grad():
                weights[worker].copy_(x)
            weights[worker].grad = slope(worker, step, x)
            optimizers[worker].step()
            return weights[worker].detach().clone()

        lr = optimizers[0].param_groups[0]["lr"]
        expected = reference_run(
            start,
            local_step,
            rule=rule,
            world_size=2,
            steps=steps,
            inner_lr=lambda _, lr=lr: lr,
            parts=[SIZE // rule.num_fragments] * rule.num_fragments,
        ).final
        for ours in run_world(2, engine):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


# -- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
@every_rule
def test_resume_at_every_step_is_bit_exact_and_the_structure_never_varies(rule, lossy):
    if lossy and not rule.bears_losses:
        return  # it refuses such a transport: tested below
    total = 3 * rule.first_tau + 1

    def wrap(transport):
        return Lossy(transport) if lossy else transport

    def whole(transport):
        worker = Worker(wrap(transport), rule)
        saved = []
        for step in range(total + 1):
            buffer = io.BytesIO()
            torch.save(worker.state(), buffer)
            saved.append(buffer.getvalue())
            if step < total:
                worker.train([step])
        worker.sync.finalize()
        return worker.flat(), worker.anchors(), saved

    results = run_world(2, whole)
    plain = trained(rule, total, wrap=wrap)
    assert torch.equal(plain[0], results[0][0]), "saving changed the run"
    shapes = [structure(torch.load(io.BytesIO(b))["sync"]["fragments"]) for b in results[0][2]]
    assert all(shape == shapes[0] for shape in shapes)

    def resumed(transport):
        flat, anchors, saved = results[transport.rank]
        worker = Worker(wrap(transport), rule, seed=99)
        for cut in reversed(range(total + 1)):  # the same engine goes back, all-reduces under way
            worker.load(torch.load(io.BytesIO(saved[cut])))
            assert worker.sync.statistics().steps == cut
            worker.train(range(cut, min(cut + 2, total)))
            worker.load(torch.load(io.BytesIO(saved[cut])))
            worker.train(range(cut, total))
            worker.sync.finalize()
            same = torch.equal(worker.flat(), flat) and torch.equal(worker.anchors(), anchors)
            assert same, f"cut at step {cut}"

    run_world(2, resumed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@every_rule
def test_distributed_checkpoint_fills_a_fresh_engines_structure(rule, tmp_path):
    steps = 2 * rule.first_tau + 1

    def first(transport):
        worker = Worker(transport, rule)
        worker.train(range(steps))
        dcp.save(worker.state(), checkpoint_id=tmp_path / str(transport.rank), no_dist=True)
        worker.train(range(steps, 2 * steps))
        worker.sync.finalize()
        return worker.flat()

    def second(transport):
        worker = Worker(transport, rule, seed=5)
        worker.train([0, 1])  # AdamW makes its state at its first step with a gradient
        state = worker.state()
        dcp.load(state, checkpoint_id=tmp_path / str(transport.rank), no_dist=True)
        worker.load(state)
        worker.train(range(steps, 2 * steps))
        worker.sync.finalize()
        return worker.flat()

    expected = run_world(2, first)
    assert all(torch.equal(a, b) for a, b in zip(run_world(2, second), expected, strict=True))


# -- nothing is lost, nothing counts twice --------------------------------------------------------


def counted(rule, steps, *, drains=(), lossy_seed=None, world_size=3, weight=None):
    """Sum of all mean payloads that arrived, the model, and how many all-reduces were lost."""

    def work(transport):
        rank = transport.rank
        lossy = Lossy(transport, seed=lossy_seed) if lossy_seed is not None else transport
        tapped = Tapped(lossy)
        model = Counter(steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=rule, transport=tapped)
        for step in range(steps):
            model.work(step, rank + 1.0)
            sync.step(None if weight is None else weight(rank, step))
            if step + 1 in drains:
                sync.finalize()
        sync.finalize()
        return tapped.arrived, model, getattr(lossy, "lost", 0)

    return run_world(world_size, work)


def expected_work(steps, mean=2.0):
    work = torch.full((steps,), mean, dtype=torch.float64)
    return torch.cat([-work, work])


def parameters_arrived(arrived):
    """Mean payloads in the order of the parameters; the buffer's payload is the last of part 0."""
    return torch.cat([value for (_, index), value in sorted(arrived.items()) if index == 0])


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    "name", [n for n, r in RULES.items() if r.merge not in {"pull", "gradients", "own"}]
)
def test_every_local_step_arrives_exactly_once(name, seed):
    if seed is not None and name in WITHOUT_LOSSES:
        return
    rule = RULES[name]
    steps = 17
    drains = [] if seed is None else [5, 6, 11]
    results = counted(rule, steps, drains=drains, lossy_seed=seed)
    for arrived, model, _ in results:
        torch.testing.assert_close(
            parameters_arrived(arrived), expected_work(steps), rtol=0, atol=1e-9
        )
        torch.testing.assert_close(model.seen, torch.full_like(model.seen, 2.0 * steps))
        assert int(model.count) == steps
    assert all_equal([torch.cat([m.p, m.q, m.seen]).detach() for _, m, _ in results])
    assert seed is None or results[0][2] > 0


@pytest.mark.parametrize("name", WAITS)
def test_lost_all_reduces_change_nothing_for_rules_that_wait(name):
    rule = RULES[name]
    plain = trained(rule, 9, dtype=torch.float64)
    lossy = trained(rule, 9, dtype=torch.float64, wrap=lambda t: Lossy(t, share=0.5))
    torch.testing.assert_close(lossy[0], plain[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SURVIVES_LOSSES)
def test_replicas_are_equal_after_losses_whatever_the_moment_of_the_drain(name):
    for steps in (5, 6, 7, 8):
        finals = trained(RULES[name], steps, world_size=3, wrap=lambda t: Lossy(t, share=0.6))
        parameters = [torch.nan_to_num(final) for final in finals]
        assert all_equal(parameters)
        assert not finals[0].isnan().any()


@pytest.mark.parametrize("name", sorted(WITHOUT_LOSSES))
def test_rules_that_cannot_send_again_refuse_a_transport_that_loses(name):
    with pytest.raises(ConfigurationError, match="may lose a round; use CO2"):
        trained(RULES[name], 1, wrap=Lossy)


def test_a_network_that_loses_everything_is_an_error_and_no_hang():
    from fivefold.errors import CommunicationError

    with pytest.raises(CommunicationError, match="was lost 16 times in a row"):
        trained(RULES["local-sgd"], 2, wrap=lambda t: Lossy(t, share=1.0))


# -- replicas -------------------------------------------------------------------------------------


@every_rule
def test_one_life_drains_versions_and_second_finalize(rule):
    tau = rule.first_tau

    def life(transport):
        worker = Worker(transport, rule, check_every_rounds=1)
        finals = []
        for step in range(6 * tau + 1):
            worker.local_step(step)
            before = [(t, t._version) for f in worker.sync._fragments for t in f.tensors()]
            record = worker.sync.statistics()
            worker.sync.step()
            after = worker.sync.statistics()
            if (record.rounds, record.merged_rounds) == (after.rounds, after.merged_rounds):
                assert all(tensor._version == version for tensor, version in before)
            if step % (2 * tau - 1) == 0:
                worker.sync.finalize()
                finals.append(worker.flat())
                record, state = worker.sync.statistics(), structure(worker.sync.state_dict())
                worker.sync.finalize()
                assert worker.sync.statistics() == record
                assert structure(worker.sync.state_dict()) == state
                assert torch.equal(worker.flat(), finals[-1])
                shared = worker.anchors()
                with worker.sync.global_parameters():
                    assert torch.equal(worker.flat(), finals[-1])
                assert torch.equal(worker.anchors(), shared)
        return torch.stack(finals)

    finals = run_world(3, life)
    assert all_equal(finals)
    assert len(finals[0]) > 2


@every_rule
def test_order_of_the_workers_and_timing_do_not_matter(rule):
    steps = 4 * rule.first_tau + 1

    def work(transport, order):
        worker = Worker(transport, rule, dtype=torch.float64, data=order[transport.rank])
        worker.train(range(steps))
        worker.sync.finalize()
        return worker.anchors()

    rng = random.Random(3)  # noqa: S311 - delays, not secrets
    plain = run_world(3, lambda t: work(t, [0, 1, 2]))[0]
    late = run_world(3, lambda t: work(t, [0, 1, 2]), launch_delay_s=lambda: 0.003 * rng.random())[
        0
    ]
    assert torch.equal(plain, late)
    permuted = run_world(3, lambda t: work(t, [2, 0, 1]))[0]
    # An outer AdamW divides by tiny numbers, so rounding may grow.
    torch.testing.assert_close(permuted, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [r for n, r in RULES.items() if n not in OF_GRADIENTS])
def test_bfloat16_parameters_have_a_float32_outer_state(rule):
    def work(transport):
        worker = Worker(transport, rule, dtype=torch.bfloat16)
        worker.train(range(10))
        worker.sync.finalize()
        groups = [group for f in worker.sync._fragments for group in f.groups]
        anchors = torch.cat([group.anchor for group in groups])
        assert anchors.dtype == torch.float32
        live = [t.detach().reshape(-1) for group in groups for t in group.tensors]
        assert torch.equal(torch.cat(live), anchors.bfloat16())
        assert not torch.equal(anchors, anchors.bfloat16().float())
        assert not any(t.isnan().any() for t in live)
        return worker.flat()

    assert all_equal(run_world(2, work))


def test_streaming_sends_one_fragment_at_a_time_also_after_a_drain():
    """Peak traffic falls by the number of fragments: no two are launched at the same step."""

    def work(transport):
        launches = []
        plain = transport.launch

        def launch(payloads, *, metadata, fragment, what):
            launches.append((worker.sync.statistics().steps, fragment))
            return plain(payloads, metadata=metadata, fragment=fragment, what=what)

        transport.launch = launch
        rule = StreamingDiLoCo(tau=4, fragments=4, outer_lr=0.5, outer_momentum=0.2)
        worker = Worker(transport, rule)
        worker.train(range(12))
        worker.sync.finalize()
        launches.append("drained")
        worker.train(range(12, 24))
        return launches

    launches = run_world(2, work)[0]
    cut = launches.index("drained")
    first, second = launches[:cut], launches[cut + 1 :]
    assert first[:12] == [(step, (step - 1) % 4) for step in range(1, 13)]
    assert second == [(step, (step - 1) % 4) for step in range(13, 25)]


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local-sgd", "delay-corrected"])
def test_weighted_mean_by_hand(name):
    weights = [3.0, 0.0, 5.0]  # rank 1 never counts
    mean = (3.0 * 1 + 5.0 * 3) / 8.0
    results = counted(RULES[name], 12, weight=lambda rank, _: weights[rank])
    for arrived, model, _ in results:
        torch.testing.assert_close(parameters_arrived(arrived), expected_work(12, mean))
        torch.testing.assert_close(
            model.p.detach(), torch.full((12,), mean, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_weights_add_up_over_the_steps_of_a_round():
    # Tokens of two steps: rank 0 has 1 + 3, rank 1 has 2 + 2, rank 2 has 0 + 8.
    tokens = [[1.0, 3.0], [2.0, 2.0], [0.0, 8.0]]
    mean = (4.0 * 1 + 4.0 * 2 + 8.0 * 3) / 16.0
    results = counted(LocalSGD(tau=2), 6, weight=lambda rank, step: tokens[rank][step % 2])
    for arrived, _, _ in results:
        torch.testing.assert_close(parameters_arrived(arrived), expected_work(6, mean))


class LosesOnce(Lossy):
    """Loses the first all-reduce of one round."""

    def launch(self, payloads, *, metadata, fragment, what):
        self.share = 1.0 if "round 1 " in what and what not in self.attempts else 0.0
        return super().launch(payloads, metadata=metadata, fragment=fragment, what=what)


@pytest.mark.parametrize("steps", [6, 9])
@pytest.mark.parametrize("second", [0.0, 1.0], ids=["then-none", "then-some"])
@pytest.mark.parametrize("name", ["co2", "delay-corrected", "slowmo"])
def test_a_lost_round_keeps_its_weight(name, second, steps):
    """Round 1 is lost; at 6 steps it goes out again alone, at 9 with a round that may weigh 0."""

    def work(transport):
        tapped = Tapped(LosesOnce(transport))
        model = Counter(steps)
        sync = OuterSync(
            model, torch.optim.SGD(model.parameters(), lr=1.0), rule=RULES[name], transport=tapped
        )
        for step in range(steps):
            model.work(step, transport.rank + 1.0)
            sync.step([3.0, 5.0][transport.rank] * (second if step >= 6 else 1.0))
        sync.finalize()
        return tapped.arrived

    arrived = parameters_arrived(run_world(2, work)[0])[:6]
    expected = torch.full((6,), -(3.0 * 1 + 5.0 * 2) / 8.0, dtype=torch.float64)
    torch.testing.assert_close(arrived, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["co2", "adamw", "sgd-hidden"])
def test_a_loaded_state_is_not_written_into(name):
    def work(transport):
        worker = Worker(transport, RULES[name])
        worker.train(range(5))
        saved = copy.deepcopy(worker.sync.state_dict())
        before = copy.deepcopy(saved["fragments"])
        worker.sync.load_state_dict(saved)
        worker.train(range(5, 11))
        pairs = zip(tensors_of(before), tensors_of(saved["fragments"]), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    assert run_world(2, work) == [True, True]


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_an_outer_optimizer_goes_on_in_the_arithmetic_that_it_had(option):
    options = {"lr": 0.01, option: True}
    rule = OuterOptimizer(tau=1, optimizer=torch.optim.Adam, options=options)

    def work(transport):
        worker = Worker(transport, rule, dtype=torch.float64)
        worker.train(range(3))
        saved = copy.deepcopy(worker.state())
        worker.train(range(3, 15))
        end = worker.flat()
        worker.load(saved)
        worker.train(range(3, 15))
        return torch.equal(end, worker.flat())

    assert run_world(2, work) == [True, True]


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for v in state.values() for t in tensors_of(v)] if isinstance(state, dict) else []


@every_rule
def test_equal_weights_are_no_weights(rule):
    def work(transport, weight):
        worker = Worker(transport, rule, dtype=torch.float64)
        worker.train(range(10), weight=weight)
        worker.sync.finalize()
        return worker.flat()

    plain = run_world(2, lambda t: work(t, None))[0]
    weighted = run_world(2, lambda t: work(t, 64.0))
    torch.testing.assert_close(weighted[0], plain, rtol=0, atol=1e-9)
    assert all_equal(weighted)


@every_rule
def test_a_round_in_which_nothing_has_weight_leaves_replicas_equal(rule):
    def work(transport):
        worker = Worker(transport, rule)
        worker.train(range(5), weight=0.0)
        worker.train(range(5, 9), weight=1.0)
        worker.sync.finalize()
        return worker.flat()

    finals = run_world(2, work)
    assert all_equal(finals)
    assert not finals[0].isnan().any()


@every_rule
def test_weights_on_some_ranks_only_are_an_error_on_all_of_them(rule):
    def work(transport):
        worker = Worker(transport, rule)
        with pytest.raises(ConfigurationError, match=r"rank\(s\) 1 gave no weight to step\(\)"):
            worker.train(range(2 * rule.first_tau), weight=None if transport.rank == 1 else 7.0)
        return True

    assert run_world(3, work) == [True] * 3


def test_weights_at_some_steps_only_are_an_error():
    def work(transport):
        worker = Worker(transport, LocalSGD(tau=4))
        worker.train([0], weight=2.0)
        with pytest.raises(ConfigurationError, match="some steps have a weight and others have no"):
            worker.train([1])

    run_world(2, work)


def test_the_delay_of_a_whole_round_is_the_published_rule_bit_for_bit():
    plain = trained(CO2(tau=4), 14)
    whole = trained(CO2(tau=4, fragments=1, delay_steps=4), 14)
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))
    short = trained(CO2(tau=4, delay_steps=3), 14)
    assert not torch.equal(plain[0], short[0])


# -- another number of workers --------------------------------------------------------------------


@every_rule
def test_resume_with_another_number_of_workers_goes_on_from_the_anchor(rule):
    cut = 2 * rule.first_tau + 1

    def first(transport):
        worker = Worker(transport, rule)
        worker.train(range(cut))
        buffer = io.BytesIO()
        torch.save(worker.state(), buffer)
        return buffer.getvalue(), worker.anchors(), worker.sync.statistics()

    saved, anchors, record = run_world(2, first)[0]

    def second(transport):
        worker = Worker(transport, rule, seed=7, check_every_rounds=1)
        worker.load(torch.load(io.BytesIO(saved)))
        assert torch.equal(worker.anchors(), anchors)
        assert worker.sync.statistics().tau == record.tau
        worker.train(range(cut, 3 * cut))
        worker.sync.finalize()
        return worker.flat()

    for world_size in (3, 4):
        assert all_equal(run_world(world_size, second))


@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(tau=3),
        DelayCorrected(tau=3, fragments=1),
        CO2(tau=3, outer_lr=1.0, outer_momentum=0.0, staleness="none", clip=None),
    ],
)
def test_resume_with_another_number_loses_the_open_steps_and_nothing_else(rule):
    """Two workers do 8 steps (2 of them open), three go on from step 8."""

    def start(transport):
        model = Counter(14)
        sync = OuterSync(model, torch.optim.SGD(model.parameters()), rule=rule, transport=transport)
        return model, sync

    def first(transport):
        model, sync = start(transport)
        for step in range(8):
            model.work(step, transport.rank + 1.0)
            sync.step()
        buffer = io.BytesIO()
        torch.save(sync.state_dict(), buffer)
        return buffer.getvalue()

    saved = run_world(2, first)[1]

    def second(transport):
        model, sync = start(transport)
        sync.load_state_dict(torch.load(io.BytesIO(saved)))
        for step in range(8, 14):
            model.work(step, transport.rank + 1.0)
            sync.step()
        sync.finalize()
        return model.p.detach()

    expected = torch.tensor([1.5] * 6 + [0.0] * 2 + [2.0] * 6, dtype=torch.float64)
    for weight in run_world(3, second):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


def test_automatic_tau_survives_another_number_of_workers():
    rule = CO2(tau=AutoTau(initial=2))

    def first(transport):
        worker = Worker(transport, rule)
        worker.sync._tau.begin_at(worker.sync._tau.state() | {"delay": 5})
        worker.sync._fragments[0].schedule.retune(5, delay_steps=None)
        worker.train(range(5))
        return worker.state()

    state = run_world(2, first)[0]

    def second(transport):
        worker = Worker(transport, rule)
        worker.sync.load_state_dict(state["sync"])
        return worker.sync._tau.tau, worker.sync._tau.local_tau(0), worker.sync.statistics().tau

    assert run_world(3, second) == [(5, 5, 5)] * 3
