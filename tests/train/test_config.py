"""Configuration: defaults, precedence, round trip, and every error by its words."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fivefold.errors import ConfigurationError
from fivefold.train.config import (
    AutoTauConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
    config_to_toml,
    load_config,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"


@pytest.fixture
def load(tmp_path):
    def load_text(text="", *overrides):
        path = tmp_path / "train.toml"
        path.write_text(text)
        return load_config(path, overrides)

    return load_text


def test_an_empty_file_gives_the_defaults(load):
    config = load()
    assert config == TrainConfig()
    assert (config.sync.method, config.sync.tau) == ("delay_corrected", 8)
    assert config.data.path == "stdlib"
    assert config.run.output == Path("runs/train")


def test_override_wins_over_file_and_file_over_default(load):
    config = load("[run]\nsteps = 70\nseed = 3\n", "run.steps=90", "run.steps=80")
    assert (config.run.steps, config.run.seed, config.run.log_every_steps) == (80, 3, 10)


def test_keys_of_muon_are_for_muon(load):
    config = load('[optim]\noptimizer = "muon"\nmomentum = 0.9\n')
    assert (config.optim.momentum, config.optim.nesterov) == (0.9, True)
    assert "nesterov = true" in config_to_toml(config)
    assert load(config_to_toml(config)) == config
    assert "momentum" not in config_to_toml(load()).partition("[optim]")[2].partition("[sync]")[0]
    with pytest.raises(ConfigurationError, match="momentum is not a setting") as caught:
        load("[optim]\nmomentum = 0.9\n")
    assert "muon" in caught.value.hint


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=1e-4", 1e-4),
        ("optim.lr = 1", 1.0),
        ("logging.tensorboard=true", True),
        ("optim.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("sync.method=slowmo", "slowmo"),
        ('sync.method="ddp"', "ddp"),
        ("data.path=/some/folder", "/some/folder"),
        ("data.path=2024", "2024"),
        ("data.path=a=b", "a=b"),
        ("run.output=runs/a b", Path("runs/a b")),
        ("run.output='runs/quoted'", Path("runs/quoted")),
        ("run.timeout_s=10 s", 10.0),
        ("run.timeout_s=2min", 120.0),
        ("run.timeout_s=0.5", 0.5),
        ("optim.grad_clip=inf", float("inf")),
    ],
)
def test_overrides_are_read_as_toml_or_bare_text(load, override, expected):
    section, key = override.partition("=")[0].strip().split(".")
    value = getattr(getattr(load("", override), section), key)
    assert value == expected
    assert type(value) is type(expected) or isinstance(value, Path)


def test_seconds_take_a_unit_in_the_file(load):
    assert load('[run]\ntimeout_s = "250 ms"\n').run.timeout_s == 0.25


def test_the_example_is_valid():
    config = load_config(EXAMPLE)
    assert config.sync.method == "delay_corrected"
    assert config.run.timeout_s == 60.0


_CO2 = "[sync]\nmethod = 'co2'\n"
# Each: file, override, words of the message, words of the hint.
BAD = [
    ("[sync]\ntua = 4\n", "", "unknown key sync.tua", "did you mean sync.tau?"),
    ("[sync]\nlr = 4\n", "", "unknown key sync.lr", "did you mean optim.lr?"),
    ("[run]\nbatchsize = 4\n", "", "unknown key run.batchsize", "did you mean optim.batch_size?"),
    ("[run]\nxyzzy = 4\n", "", "unknown key run.xyzzy", "[run] has output, seed, steps"),
    ("[modle]\nwidth = 4\n", "", "'modle'", "did you mean [model]?"),
    ("steps = 4\n", "", "'steps' at the top level", "did you mean run.steps?"),
    ("qqqq = 4\n", "", "'qqqq'", "[model], [model.moe], [optim], [sync]"),
    ("run = 4\n", "", "run must be a table; got 4", "write [run]"),
    ("[run]\nsteps = 'ten'\n", "", "run.steps must be an integer; got 'ten' (a string)", "is 200"),
    ("[run]\nsteps = 1.5\n", "", "run.steps must be an integer; got 1.5 (a number)", "default"),
    ("[run]\nsteps = true\n", "", "run.steps must be an integer; got true (a boolean)", "default"),
    ("[logging]\ntensorboard = 1\n", "", "logging.tensorboard must be true or false", "false"),
    ("[run]\noutput = 5\n", "", "run.output must be a path in quotes; got 5", "runs/train"),
    ("[run]\noutput = ''\n", "", "run.output", "folder"),
    ("[data]\npath = ['a']\n", "", "data.path must be a string; got ['a'] (a list)", "stdlib"),
    ("[data]\npath = ''\n", "", "data.path must be a string that is not empty", "stdlib"),
    ("[run]\nsteps = 0\n", "", "run.steps must be at least 1; got 0", "optimizer steps"),
    ("[sync]\ntau = 0\n", "", "sync.tau must be an integer of at least 1, or", "steps per round"),
    ("[sync]\ntau = 'atuo'\n", "", "; got 'atuo'", "its default is 8"),
    ("[sync]\ntau = true\n", "", 'or "auto"; got True', "its default is 8"),
    ("[sync]\npull = 0.5\n", "", 'sync.pull is not a setting of sync.method = "delay_corrected"',
     "it is for overlap_local_sgd; delay_corrected takes auto_tau,"),
    ("[sync]\nmethod = 'ddp'\ntau = 4\n", "", "sync.tau is not a setting of", "ddp takes codec"),
    ("", "sync.method=none\nsync.codec=fp32", "sync.method must be one of", "co2"),
    ("[sync]\nmethod = 'ddp'\ncodec = 'int8'\n", "", "is not for ddp", '"bf16" or "fp16"'),
    ("[sync]\ntau = 8\ncodec = 'auto'\n", "", "is chosen with the round", 'sync.tau = "auto"'),
    ("[sync]\ncodec = 'int9'\n", "", "sync.codec must be one of 'fp32', 'bf16'", "on the wire"),
    ("[sync]\nmethod = 'CO2'\n", "", "got 'CO2'", 'did you mean "co2"?'),
    ("[run]\ndevice = 'cpuu'\n", "", "run.device must be one of", 'did you mean "cpu"?'),
    (f"{_CO2}staleness = 'gapp'\n", "", "sync.staleness 'gapp' is not kn", 'did you mean "gap"?'),
    (f"{_CO2}staleness = 'constant:x'\n", "", "sync.staleness 'constant:x' is not", "constant:2"),
    (f"{_CO2}staleness = 'constant:0.5'\n", "", "sync.staleness 'constant:0.5'", "at least 1"),
    (f"{_CO2}staleness = 3\n", "", "sync.staleness must be a string; got 3", "penalty"),
    (f"{_CO2}outer_lr = 50\n", "", "sync.outer_lr must be at most 10; got 50", "mean"),
    ("[optim]\nlr = 30\n", "", "optim.lr must be at most 1; got 30", "AdamW"),
    ("[optim]\nlr = 1\nweight_decay = 2\n", "", "weight_decay must be at most 1", "lower"),
    ("[run]\ntimeout_s = 1e300\n", "", "run.timeout_s must be at most 2.592e+06", "30 days"),
    ("[run]\nthreads = 1000000\n", "", "run.threads must be at most 4096", "per rank"),
    ("[run]\nsteps = 99999999999999999999\n", "", "run.steps must be a number", "go from"),
    ("[model]\nlayers = 1000000000\n", "", "model.layers must be at most 10000", "blocks"),
    ("[sync]\nmethod = 'diloco'\n", "sync.tau=auto", "hides its rounds; got diloco", "use co2,"),
    ("[sync.auto_tau]\nmaximum = 9\n", "", '[sync.auto_tau] is for sync.tau = "auto"', "drop"),
    ("[sync]\ntau = 'auto'\n", "sync.auto_tau.minimum=9", "minimum 9, initial 8", "between"),
    ("[sync.auto_tau]\nmaximun = 9\n", "", "unknown key sync.auto_tau.maximun",
     "did you mean sync.auto_tau.maximum?"),
    ("[sync.auto_tau]\nwindow = 0\n", "", "sync.auto_tau.window must be at least 1; got 0", "is 3"),
    ("[sync]\nauto_tau = 3\n", "", "sync.auto_tau must be a table; got 3", "[sync.auto_tau]"),
    ("[sync]\nmethod = 'streaming_diloco'\nfragments = 9\n", "",
     "sync.fragments must be at most sync.tau=8; got 9", "raise sync.tau"),
    ("[sync]\nmethod = 'streaming_diloco'\ndelay_steps = 9\n", "",
     "sync.delay_steps must be at most sync.tau=8; got 9", "lower sync.delay_steps"),
    (f"{_CO2}outer_momentum = 1.0\n", "", "outer_momentum must be less than 1; got 1", "[0, 1)"),
    (f"{_CO2}outer_lr = 0\n", "", "outer_lr must be greater than 0; got 0", "the method's own"),
    ("[optim]\nlr = nan\n", "", "optim.lr must be", "numbers to compute with"),
    ("[optim]\ngrad_clip = nan\n", "", "optim.grad_clip must be a finite number; got nan", "inf"),
    ("[optim]\nlr = inf\n", "", "optim.lr must be a finite number; got inf", "0.003"),
    ("[data]\nvalidation_fraction = 1.0\n", "", "must be less than 1; got 1", "between 0 and 1"),
    ("[sync]\nmethod = 'CO2'\n", "", "sync.method must be one of 'none'", "co2"),
    ("[optim]\nbetas = [0.9]\n", "", "optim.betas must be a list of two numbers", "[0.9, 0.95]"),
    ("[optim]\nbetas = [0.9, 0.9, 0.9]\n", "", "must be a list of two numbers", "[0.9, 0.95]"),
    ("[optim]\nbetas = [0.9, 1]\n", "", "optim.betas[1] must be less than 1; got 1", "betas"),
    ("[optim]\nbetas = 0.9\n", "", "optim.betas must be a list of two numbers; got 0.9", "betas"),
    ("[run]\ntimeout_s = '10 parsecs'\n", "", "run.timeout_s: '10 parsecs' is not a dur", "unit"),
    ("[run]\ntimeout_s = 0\n", "", "run.timeout_s must be greater than 0; got 0", "120.0"),
    ("[run]\ntimeout_s = true\n", "", "run.timeout_s must be a number; got true", "120.0"),
    ("[model]\nwidth = 100\nheads = 3\n", "", "width 100, heads 3", "use width 96 or 102"),
    ("[model]\nwidth = 20\nheads = 4\n", "", "got width 20, heads 4", "use width 16 or 24"),
    ("[model]\nwidth = 2\nheads = 4\n", "", "got width 2, heads 4", "use width 8 with 4 heads"),
    ("[run]\nsteps = 5\n", "", "optim.warmup_steps must be at most run.steps; got 20 (the default)",
     "lower optim.warmup_steps, for example to 0"),
    ("[optim]\nwarmup_steps = 300\n", "", "got 300 and 200 steps", "for example to 20"),
    ("[sync]\nsynchronous_start = 9\nsynchronous_end = 192\n", "", "got 9 + 192 of 200 steps",
     "raise run.steps"),
    ("[sync.average_states]\nexp_av = 3\n", "", "sync.average_states has 'exp_av', which optim.opt",
     "did you mean 'exp_avg'?"),
    ("[sync.average_states]\nmomentum_buffer = 3\n", "", "'momentum_buffer', which optim.optimizer",
     "choose one of exp_avg, exp_avg_sq"),
    ("", "run.steps", "override 'run.steps' is not of the form", "run.steps=50"),
    ("", "steps=5", "override 'steps=5' is not of the form", "run.steps=50"),
    ("", "run.stps=5", "unknown key run.stps", "did you mean run.steps?"),
    ("", "optim.lr=fast", "optim.lr must be a number; got 'fast' (a string)", "0.003"),
    ("", "run.steps=5\nseed=3", "run.steps must be an integer", "default"),
    ("[run\n", "", "train.toml is not TOML", "line 1"),
    ("[run]\nsteps = = 5\n", "", "at line 2", "[run]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "override", "message", "hint"), BAD)
def test_errors_name_the_key_the_value_and_the_remedy(load, text, override, message, hint):
    with pytest.raises(ConfigurationError) as caught:
        load(text, *([override] if override else []))
    error = caught.value
    assert message in error.message
    assert hint in (error.hint or "") or hint in error.message
    assert "pydantic" not in str(error)
    # A user who asks for the traceback does not see pydantic's either.
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


def test_a_misspelled_key_comes_first_and_the_other_problems_are_listed(load):
    with pytest.raises(ConfigurationError) as caught:
        load("[run]\nsteps = 0\n[sync]\ntua = 4\ntau = 0\n")
    assert caught.value.message.startswith("unknown key sync.tua")
    assert "also wrong: run.steps, sync.tau" in caught.value.message


def test_a_missing_file_is_named_and_so_is_the_nearest(tmp_path):
    with pytest.raises(ConfigurationError, match="does not exist") as caught:
        load_config(tmp_path / "none.toml")
    assert "examples/train.toml" in caught.value.hint
    (tmp_path / "train.toml").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        load_config(tmp_path / "trian.toml")
    assert caught.value.hint == f"did you mean {tmp_path / 'train.toml'}?"


def test_a_folder_and_a_binary_file_are_no_configuration(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_config(tmp_path / "binary.toml")


def test_configurations_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().run.steps = 5


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


rates = st.floats(min_value=0, max_value=1, exclude_min=True)
names = st.text(st.characters(min_codepoint=33, max_codepoint=500), min_size=1, max_size=9)
SYNC = st.one_of(
    st.builds(
        SyncConfig,
        method=st.just("co2"),
        clip=positive | st.just(float("inf")),
        tau=st.integers(1, 99),
    ),
    st.sampled_from(["none", "ddp", "local_sgd", "slowmo", "diloco", "streaming_diloco"]).map(
        lambda method: SyncConfig(method=method)
    ),
    st.builds(
        lambda maximum: SyncConfig(tau="auto", auto_tau=AutoTauConfig(maximum=maximum)),
        st.integers(8, 99),
    ),
    st.builds(
        lambda options: SyncConfig(method="outer_optimizer", options=options, hidden=True),
        st.dictionaries(names, st.booleans() | positive | st.integers(-9, 9) | texts, max_size=3),
    ),
)


@given(
    run=st.builds(
        RunConfig,
        steps=st.integers(20, 10**9),
        seed=st.integers(0, 2**63 - 1),
        timeout_s=st.floats(0, 30 * 24 * 3600, exclude_min=True),
        resume=texts,
    ),
    data=st.builds(DataConfig, path=texts, tokenizer=texts, cache=texts),
    optim=st.builds(
        OptimConfig, lr=rates, betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)
    ),
    sync=SYNC,
)
def test_what_is_written_is_read_back_equal(tmp_path_factory, run, data, optim, sync):
    config = TrainConfig(run=run, data=data, optim=optim, sync=sync, model=ModelConfig(layers=1))
    text = config_to_toml(config)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_bytes(text.encode())
    assert load_config(path) == config
    # Every key that has a value is there, tables within tables last.
    assert {name: set(table) for name, table in tomllib.loads(text).items()} == {
        name: set(getattr(config, name).model_dump(exclude_none=True))
        for name in TrainConfig.model_fields
        if getattr(config, name) is not None
    }


def test_keys_that_are_left_out_are_the_methods_own(load):
    sync = load("[sync]\nmethod = 'diloco'\n").sync
    assert sync.outer_lr == 0.7
    assert (sync.outer_momentum, sync.staleness, sync.pull) == (None, None, None)
    assert load("[sync]\ntau = 'auto'\n").sync.auto_tau == AutoTauConfig()
    sync = load("", "sync.method=outer_optimizer", "sync.optimizer=AdamW").sync
    assert (sync.optimizer, sync.options) == ("AdamW", None)


def test_tables_within_tables_are_overridden_by_key(load):
    file = "[sync]\nmethod = 'outer_optimizer'\n[sync.options]\nlr = 0.5\nmomentum = 0.1\n"
    assert load(file, "sync.options.lr=0.25").sync.options == {"lr": 0.25, "momentum": 0.1}
    assert load(file, "sync.options={lr = 1.0}").sync.options == {"lr": 1.0}
    assert load("", "sync.tau=auto", "sync.auto_tau.maximum=64").sync.auto_tau.maximum == 64


def test_another_method_on_the_command_line_drops_the_files_keys_and_says_so(load, caplog):
    caplog.set_level("INFO")
    file = "[sync]\ntau = 4\nouter_lr = 0.3\nstaleness = 'none'\n"
    assert load(file, "sync.method=ddp").sync == SyncConfig(method="ddp")
    assert caplog.messages == [
        "ddp does not take sync.tau, sync.outer_lr, sync.staleness of the file"
    ]
    assert load(file, "sync.method=diloco").sync == SyncConfig(method="diloco", tau=4, outer_lr=0.3)
    with pytest.raises(ConfigurationError, match="tau is not a setting"):
        load(file, "sync.method=ddp", "sync.tau=4")  # asked for, not left over
