"""What the engine and its rules refuse, by message."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from fivefold import optim
from fivefold.errors import ConfigurationError
from fivefold.optim.codecs import named_codec
from fivefold.optim.transport import as_group
from fivefold.testing import run_world


def make(transport, rule):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, optim.OuterSync(model, optimizer, rule=rule, transport=transport)


@pytest.mark.parametrize(
    ("make_rule", "message"),
    [
        (lambda: optim.CO2(tau=0), "tau must be a whole number from 1.*got 0"),
        (lambda: optim.CO2(tau=2.5), "tau must be a whole number from 1.*got 2.5"),
        (lambda: optim.CO2(tau=True), "tau must be a whole number from 1"),
        (lambda: optim.CO2(tau=2, outer_lr=0), "outer_lr must be a positive number; got 0"),
        (
            lambda: optim.CO2(tau=2, outer_momentum=1.0),
            r"outer_momentum must be in \[0, 1\); got 1.0",
        ),
        (lambda: optim.CO2(tau=2, outer_momentum="0.5"), r"outer_momentum must be .* got '0.5'"),
        (lambda: optim.CO2(tau=2, staleness=2.0), "staleness must be a name or a penalty; got 2.0"),
        (lambda: optim.GapPenalty(decay=None), "decay must be in .* got None"),
        (lambda: optim.codecs.TopKCodec(density="0.1"), "density must be .* got '0.1'"),
        (lambda: optim.CO2(tau=2, clip=-1.0), "clip must be a positive number; got -1.0"),
        (lambda: optim.CO2(tau=2, staleness="gapp"), "'gapp' is not known; use one of gap, "),
        (lambda: optim.CO2(tau=2, staleness="constant:x"), "no number after the colon"),
        (lambda: optim.ConstantPenalty(0.0), "must be a positive number"),
        (lambda: optim.CO2(tau=2, bootstrap="none"), "bootstrap is 'none'"),
        (lambda: optim.CO2(tau=2, units="steps"), "units is 'steps'"),
        (lambda: optim.LocalSGD(tau=2, outer_lr=0.5), "LocalSGD takes tau only"),
        (lambda: optim.SlowMo(tau=2, staleness="gap"), "nothing is stale"),
        (
            lambda: optim.DiLoCo(tau=2, clip=1.0),
            "DiLoCo takes tau, outer_lr and outer_momentum only",
        ),
        (
            lambda: optim.DelayCorrected(tau=2, outer_momentum=0.5),
            "DelayCorrected takes tau, fragments and delay_steps only",
        ),
        (
            lambda: optim.EagerDiLoCo(tau=2, clip=1.0),
            "EagerDiLoCo takes tau, outer_lr and outer_mom",
        ),
        (
            lambda: optim.OverlapLocalSGD(tau=2, pull=1.0),
            "pull must be between 0 and 1, both excluded",
        ),
        (
            lambda: optim.OverlapLocalSGD(tau=2, outer_lr=0.5),
            "OverlapLocalSGD takes tau, outer_momentum and pull only",
        ),
        (lambda: optim.StreamingDiLoCo(tau=2, fragments=4), "fragments must be .* 1 to 2; got 4"),
        (
            lambda: optim.StreamingDiLoCo(tau=4, delay_steps=5),
            "delay_steps must be .* 1 to 4; got 5",
        ),
        (
            lambda: optim.StreamingDiLoCo(tau=4, keep=0.0),
            "keep must be between 0 and 1, both excluded",
        ),
        (lambda: optim.DelayCorrected(tau=4, fragments=5), "fragments must be .* 1 to 4; got 5"),
        (
            lambda: optim.DelayCorrected(tau=4, delay_steps=0),
            "delay_steps must be .* 1 to 4; got 0",
        ),
        (
            lambda: optim.DelayCorrected(tau="auto", delay_steps=1),
            'tau="auto" chooses the delay too',
        ),
        (
            lambda: optim.DelayCorrected(tau=optim.AutoTau(balance=True), fragments=2),
            "fragments cannot be sent",
        ),
        (lambda: optim.LocalSGD(tau="auto"), 'tau="auto" needs a rule that hides its rounds'),
        (lambda: optim.CO2(tau="eight"), "tau 'eight' is not known"),
        (lambda: optim.CO2(tau=optim.AutoTau(initial=0)), "initial must be a whole number from 1"),
        (
            lambda: optim.OuterOptimizer(tau=2, optimizer=torch.optim.SGD, options={"lrr": 1.0}),
            "refuses options=.*lrr",
        ),
        (
            lambda: optim.OuterOptimizer(
                tau=2, optimizer=torch.optim.SGD, options={"lr": 1.0}, outer_lr=0.5
            ),
            "put the learning rate and momentum into options",
        ),
    ],
)
def test_rules_refuse_what_makes_no_sense(make_rule, message):
    with pytest.raises(ConfigurationError, match=message):
        make_rule()


def test_world_of_one_is_refused_with_a_hint():
    with pytest.raises(ConfigurationError, match="at least two ranks; got world_size=1; start"):
        run_world(1, lambda t: make(t, optim.CO2(tau=1)))


def test_uninitialised_torch_distributed_is_refused_with_a_hint():
    with pytest.raises(ConfigurationError, match=r"not initialised; call torch\.distributed\.init"):
        make(None, optim.CO2(tau=1))


def test_different_rules_or_models_are_refused():
    with pytest.raises(ConfigurationError, match="has another rule than rank"):
        run_world(2, lambda t: make(t, optim.CO2(tau=1 + t.rank)))

    def other_model(transport):
        model = torch.nn.Linear(2 + transport.rank, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optim.OuterSync(model, optimizer, rule=optim.CO2(tau=1), transport=transport)

    with pytest.raises(ConfigurationError, match="has another parameters than rank"):
        run_world(2, other_model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, _: m.weight.requires_grad_(requires_grad=False), "parameters.*'frozen'"),
        (lambda m, _: m.register_buffer("x", torch.zeros(3)), "set of averaged tensors"),
        (lambda m, _: m.register_buffer("x", torch.zeros(3).int()), "set of fixed tensors"),
        (lambda _, t: setattr(t, "codec", named_codec("int4")), "codec.*int4"),
    ],
    ids=["frozen", "averaged", "fixed", "codec"],
)
def test_ranks_that_would_send_different_tensors_are_refused_before_they_do(change, message):
    def work(transport):
        model = torch.nn.Linear(2, 1)
        transport.codec = named_codec("int8")
        if transport.rank == 1:
            change(model, transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optim.OuterSync(model, optimizer, rule=optim.CO2(tau=1), transport=transport)

    with pytest.raises(ConfigurationError, match=f"rank . has another {message}"):
        run_world(2, work)


@pytest.mark.parametrize(
    ("make_one", "told"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.02), "'lr', 0.0"),
        (lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95)), "'betas'"),
        (lambda p: torch.optim.SGD(p, lr=0.01), "'SGD'"),
    ],
)
def test_optimizers_of_other_settings_are_refused_at_the_start(make_one, told):
    def work(transport):
        model = torch.nn.Linear(2, 1)
        kinds = [lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False), make_one]
        optimizer = kinds[transport.rank](model.parameters())
        optim.OuterSync(model, optimizer, rule=optim.CO2(tau=1), transport=transport)

    with pytest.raises(ConfigurationError, match=f"another optimizer than rank.*{told}"):
        run_world(2, work)


def test_frozen_model_is_refused():
    def work(transport):
        model = torch.nn.Linear(2, 1).requires_grad_(requires_grad=False)
        weight = torch.nn.Parameter(torch.zeros(1))
        optim.OuterSync(
            model, torch.optim.SGD([weight]), rule=optim.CO2(tau=1), transport=transport
        )

    with pytest.raises(ConfigurationError, match="no parameter with requires_grad"):
        run_world(2, work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": optim.CO2}, "rule must be an outer rule; got <class"),
        ({"timeout_s": float("inf")}, "timeout_s must be a positive number of seconds; got inf"),
        ({"average_states": ["exp_avg"]}, "average_states must be a table"),
        ({"outer_device": ["cpu"]}, "outer_device must be 'same' or 'cpu'"),
        ({"codec": "int8"}, "codec='int8' has no use: the transport that was given sends"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, message):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {"rule": optim.CO2(tau=2)} | arguments
    with pytest.raises(ConfigurationError, match=message):
        run_world(2, lambda t: optim.OuterSync(model, optimizer, transport=t, **arguments))


@pytest.mark.parametrize("group", [0, [0, 1], -100])
def test_a_group_that_is_none_is_refused(group):
    with pytest.raises(ConfigurationError, match="process_group must be a process group that has"):
        as_group(group, name="process_group", dimension="replicate")


def test_what_is_no_state_is_refused():
    def work(transport):
        model, _, sync = make(transport, optim.CO2(tau=2))
        sync.load_state_dict(model.state_dict())

    with pytest.raises(ConfigurationError, match="this is no state of an OuterSync"):
        run_world(2, work)


def test_state_of_another_rule_is_refused():
    def work(transport):
        _, _, sync = make(transport, optim.CO2(tau=2))
        state = copy.deepcopy(sync.state_dict())
        _, _, other = make(transport, optim.SlowMo(tau=2))
        other.load_state_dict(state)

    with pytest.raises(ConfigurationError, match="resume with the same rule"):
        run_world(2, work)


def test_a_state_that_one_rank_cannot_load_is_refused_by_all():
    """At once: the others do not wait for that rank in a comparison that it never reaches."""

    def work(transport):
        _, _, sync = make(transport, optim.CO2(tau=2))
        state = copy.deepcopy(sync.state_dict())
        if transport.rank == 1:
            state["settings"]["rule"] = "another"
        with pytest.raises(ConfigurationError) as refused:
            sync.load_state_dict(state)
        return str(refused.value)

    first, second = run_world(2, work)
    assert first.startswith("rank 1 cannot load: ")
    assert "resume with the same rule" in second


@pytest.mark.parametrize("gone", ["fragments", "schedule", "scalars", "anchor"])
def test_a_state_that_is_damaged_on_one_rank_is_refused_by_all(gone):
    """Before anything is written: what one rank lacks the others would wait for."""

    def work(transport):
        model, _, sync = make(transport, optim.CO2(tau=2))
        state = copy.deepcopy(sync.state_dict())
        if transport.rank == 1:
            part = state["fragments"]["0"]
            if gone == "fragments":
                del state["fragments"]["0"]
            elif gone == "anchor":
                for entries in part["tensors"].values():
                    entries["anchor"] = 0.0
            else:
                del part[gone]
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ConfigurationError) as refused:
            sync.load_state_dict(state)
        assert all(map(torch.equal, before, model.parameters()))
        return str(refused.value)

    first, second = run_world(2, work)
    assert first.startswith("rank 1 cannot load: ")
    assert "the outer state is damaged" in second


def test_zero_inner_learning_rate_in_lr_units_is_an_error():
    def work(transport):
        model, optimizer, sync = make(transport, optim.SlowMo(tau=1))
        optimizer.param_groups[0]["lr"] = 0.0
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        sync.step()

    with pytest.raises(ConfigurationError, match='units="lr" needs a positive inner learning rate'):
        run_world(2, work)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "1"])
def test_weights_that_are_no_weights_are_refused(weight):
    def work(transport):
        _, _, sync = make(transport, optim.LocalSGD(tau=1))
        sync.step(weight)

    with pytest.raises(ConfigurationError, match="weight must be finite and not negative"):
        run_world(2, work)


def test_more_fragments_than_parameters_are_refused():
    rule = optim.StreamingDiLoCo(tau=4, fragments=3)
    with pytest.raises(ConfigurationError, match="fragments=3 is more than the model's 2"):
        run_world(2, lambda t: make(t, rule))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_outer_optimizers_that_cannot_step_on_a_dense_gradient_are_refused(name):
    with pytest.raises(ConfigurationError, match="refuses options"):
        optim.OuterOptimizer(tau=2, optimizer=getattr(torch.optim, name))


def test_an_outer_optimizer_for_matrices_refuses_a_bias():
    rule = optim.OuterOptimizer(tau=2, optimizer=torch.optim.Muon, options={"lr": 0.1})

    def work(transport):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="refuses the model's parameters"):
            optim.OuterSync(model, optimizer, rule=rule, transport=transport)

    run_world(2, work)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_model_that_communicates_by_itself_is_refused_also_compiled():
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    for model in (wrapped, torch.compile(wrapped)):
        with pytest.raises(ConfigurationError, match="wrapped in DistributedDataParallel"):
            optim.OuterSync(
                model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), rule=optim.CO2(tau=2)
            )
