"""The configuration: what it takes, and errors that name the key and the remedy."""

import math
import subprocess
import sys

import pytest

from fivefold.errors import ConfigurationError
from fivefold.gnn.training import GnnConfig, load_gnn_config
from fivefold.runs import format_toml

DATA = '[data]\npath = "g"\n'


def load(tmp_path, text, overrides=()):
    file = tmp_path / "gnn.toml"
    file.write_text(text)
    return load_gnn_config(file, overrides)


def test_a_file_with_the_data_alone_is_whole_and_comes_back_equal(tmp_path):
    config = load(tmp_path, DATA)
    assert config.sampling.fanouts == (10, 10, 10)
    assert load(tmp_path, format_toml(config.model_dump())) == config


def test_units_and_overrides(tmp_path):
    text = DATA + '[budgets]\nhost = "1.5 GB"\n[run]\ntimeout_s = "2 min"\n'
    overrides = ["budgets.disk=3 GB", "sampling.fanouts=[5, -1]", "data.path=2024", "run.epochs=7"]
    config = load(tmp_path, text, overrides)
    assert (config.budgets.host, config.budgets.disk) == (1_500_000_000, 3_000_000_000)
    assert config.run.timeout_s == 120.0
    assert config.sampling.fanouts == (5, -1)
    assert str(config.data.path) == "2024"
    assert config.run.epochs == 7
    assert math.isinf(config.optim.grad_clip)
    assert load(tmp_path, format_toml(config.model_dump())) == config


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "data.path is missing", "folder of the data set"),
        ("[run]\nepochs = 2\n", "data.path is missing", "folder of the data set"),
        (DATA + "[modle]\n", "unknown table or key 'modle'", "did you mean [model]?"),
        ("epochs = 3\n" + DATA, "unknown table or key 'epochs'", "did you mean run.epochs?"),
        (DATA + "[model]\nhiden = 3\n", "unknown key model.hiden", "did you mean model.hidden"),
        (DATA + "[model]\nfanouts = [3]\n", "unknown key model.fanouts", "sampling.fanouts?"),
        (DATA + "[run]\nepochs = 0\n", "run.epochs must be at least 1; got 0", "passes over"),
        (DATA + "[run]\nepochs = true\n", "must be an integer; got true", "its default is 10"),
        (DATA + '[run]\nmode = "dsk"\n', "one of 'disk', 'memory' or 'online'", "origin of"),
        (DATA + "[sampling]\nfanouts = []\n", "fanouts must not be empty", "[10, 10]"),
        (DATA + "[sampling]\nfanouts = [0]\n", "positive, or -1 for all", "[10, 10]"),
        (DATA + '[sampling]\nfanouts = ["a"]\n', "must be an integer; got 'a'", "fanouts"),
        (DATA + '[budgets]\nhost = "1 Gx"\n', "budgets.host: '1 Gx' is not a size", "10 MB"),
        (DATA + "[budgets]\ndisk = -1\n", "budgets.disk must be at least 0", "disk space"),
        (DATA + '[model]\nname = "gat"\nheads = 3\n', "got 128 and 3", "use hidden_dim = 126"),
        (DATA + '[plan]\npolicy = "belady"\n', "needs the planned order", "loader.shuffle = false"),
        (DATA + "[validation]\nfanouts = [3]\n", "has 1 hops, but", "one number per layer"),
        ("model = 3\n" + DATA, "model must be a table; got 3", "write [model]"),
        ("[data\n", "is not TOML", "tables look like"),
    ],
)
def test_errors_name_the_key_and_the_remedy(text, message, hint, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_misspelled_file_is_found(tmp_path):
    (tmp_path / "gnn_train.toml").write_text(DATA)
    with pytest.raises(ConfigurationError, match=r"did you mean .*gnn_train\.toml"):
        load_gnn_config(tmp_path / "gnn_trian.toml")
    with pytest.raises(ConfigurationError, match="not of the form"):
        load_gnn_config(tmp_path / "gnn_train.toml", ["epochs=3"])


def test_every_key_says_what_it_is():
    for table in GnnConfig.model_fields.values():
        for name, field in table.annotation.model_fields.items():
            assert field.description, name
            assert "\n" not in field.description, name


def test_the_configuration_needs_neither_torch_nor_numba():
    code = (
        "import sys; from fivefold.gnn.training import GnnConfig, load_gnn_config\n"
        "found = {'torch', 'numba', 'numpy', 'torch_geometric'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
