"""What can be known to be wrong before ranks start is said before they start."""

import os
import subprocess
import sys
import typing

import pytest
import torch.distributed.launcher.api
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.optim import CO2
from fivefold.runs import FolderLock, format_toml
from fivefold.train import TrainConfig, config_to_toml, launch, load_config


@pytest.fixture
def refused(make_config, tmp_path, monkeypatch):
    """The error of a launch of two ranks, of which none may have been started."""

    def started(*_arguments, **_settings):
        pytest.fail("ranks were started")

    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", started)

    def error(*overrides, method="co2", nproc=2):
        path = tmp_path / "config.toml"
        path.write_text(config_to_toml(make_config(method)))
        with pytest.raises(FivefoldError) as caught:
            launch(path, overrides, nproc=nproc)
        return caught.value

    return error


# Each: overrides, words of the message, words of the hint.
WRONG = {
    "penalty": (["sync.staleness=gapp"], "sync.staleness 'gapp'", 'did you mean "gap"?'),
    "outer optimizer": (
        ["sync.method=outer_optimizer", "sync.optimizer=SGDD"],
        "'SGDD' is not an optimizer",
        "did you mean SGD?",
    ),
    "option's name": (
        ["sync.method=outer_optimizer", "sync.options={momentun = 0.9}"],
        "sync.options.momentun is not an argument of torch.optim.SGD",
        "did you mean 'momentum'?",
    ),
    "option's value": (
        ["sync.method=outer_optimizer", "sync.options={lr = -1.0}"],
        "Invalid learning rate",
        "keyword arguments",
    ),
    "option's type": (
        ["sync.method=outer_optimizer", "sync.options={lr = 'fast'}"],
        "refuses options",
        "keyword arguments",
    ),
    "outer rate": (["sync.outer_lr=50"], "sync.outer_lr must be at most 10", "mean"),
    "data": (["data.path=/no/such/folder"], "/no/such/folder does not exist", "data.path"),
    "data is a file": (
        ["data.path=/proc/version"],
        "is neither a folder nor a file with content",
        "data.path",
    ),
    "tokenizer": (["data.tokenizer=/no/tokenizer.json"], "/no/tokenizer.json", "data.tokenizer"),
    "tokenizer is a device": (["data.tokenizer=/dev/null"], "not a regular file", "data.tokenizer"),
    "resume": (["run.resume=atuo"], "run.resume names atuo", 'did you mean "auto"?'),
    "output is a file": (["run.output=/proc/version/x"], "cannot write", "check the folder"),
    "experts": (
        ["sync.method=ddp", "model.moe.experts=9", "model.moe.expert_parallel=3"],
        "needs a multiple of 3 ranks",
        "start 3 ranks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_no_rank_is_started(refused, name):
    overrides, message, hint = WRONG[name]
    error = refused(*overrides)
    assert message in error.message
    assert error.hint is not None
    assert hint in error.hint


def test_a_missing_device_is_said_before_ranks_start(refused):
    if torch.cuda.device_count() >= 99:
        pytest.skip("this host has enough")
    assert "99 ranks need as many CUDA devices" in refused("run.device=cuda", nproc=99).message


def test_a_folder_in_use_is_said_before_ranks_start(refused, make_config):
    output = make_config("co2").run.output
    with FolderLock(output, "run.output"):
        assert f"process {os.getpid()} on" in refused().message


def test_a_fifo_as_tokenizer_is_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in refused(f"data.tokenizer={tmp_path / 'fifo'}").message


@pytest.mark.parametrize(
    "name", ["gap", "gap-rms", "gap-param", "constant", "none", "constant:1", "constant:2"]
)
def test_every_penalty_of_the_rule_can_be_configured(tmp_path, name):
    path = tmp_path / "config.toml"
    path.write_text(f'[sync]\nmethod = "co2"\nstaleness = "{name}"\n')
    CO2(tau=4, staleness=name)
    assert load_config(path).sync.staleness == name


def keys(schema, prefix=""):
    for name, field in schema.model_fields.items():
        tables = typing.get_args(field.annotation) or (field.annotation,)
        below = [kind for kind in tables if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if below:
            yield from keys(below[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


# A table that has no defaults: fivefold plan writes the whole of it.
PREDICTION = {"cluster": "two", "ranks": 2, "settings": "none"} | dict.fromkeys(
    ("compute_s", "exposed_communication_s", "bubble_s", "other_s", "all_reduce_s",
     "memory_bytes"), 1.0,
)  # fmt: skip
DATE = "2020-01-01"  # in a file without quotes
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
    st.sampled_from(["auto", "none", "co2", "ddp", "1 s", "gap", "-1", "1e9 s", "inf"]),
    st.lists(st.integers() | st.floats() | st.text("ab"), max_size=3),
    st.dictionaries(st.text("abc", min_size=1), st.integers(0, 3), max_size=2),
    st.just(DATE),
)


@given(
    method=st.sampled_from(["co2", "ddp", "none", "streaming_diloco", "outer_optimizer"]),
    wrong=st.dictionaries(st.sampled_from(sorted(keys(TrainConfig))), VALUES, max_size=3),
)
def test_any_value_of_any_key_is_taken_or_refused_by_name(tmp_path_factory, method, wrong):
    tables = {"sync": {"method": method}}
    if any(key.startswith("prediction.") for key in wrong):
        tables["prediction"] = dict(PREDICTION)
    for key, value in wrong.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(format_toml(tables).replace(f'"{DATE}"', DATE))
    try:
        config = load_config(file)
    except ConfigurationError as error:
        said = str(error)
    else:
        again = file.with_name("again.toml")
        again.write_text(config_to_toml(config))
        assert load_config(again) == config
        return
    assert not said.startswith(":")
    # The key, or a table that the method does not take.
    parts = {part for key in wrong for part in (f"[{key.split('.')[0]}]", *key.split(".")[1:])}
    assert any(part in said for part in parts), f"{said} names none of {wrong}"


@pytest.mark.parametrize(
    ("overrides", "nproc", "words"),
    [([], 1, "needs at least two ranks"), (["sync.shard=2"], 2, "two workers or more")],
)
def test_a_number_of_ranks_is_refused_before_torch_is_loaded(
    tmp_path, make_config, overrides, nproc, words
):
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(make_config("co2")))
    program = (
        "import sys\nfrom fivefold.cli._main import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    sets = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-c", program, "train", str(path), "--nproc", str(nproc), *sets]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert words in ended.stderr
    assert "assert" not in ended.stderr
