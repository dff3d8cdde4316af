"""A rule is declared once: one file, and whatever knows rules knows it."""

import ast
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fivefold
from fivefold import optim
from fivefold.cli._plan_files import as_sent
from fivefold.errors import ConfigurationError
from fivefold.optim._rules import base
from fivefold.strategy import load_cluster
from fivefold.testing import run_world
from fivefold.train._methods import method_label
from fivefold.train.config import SyncConfig, TrainConfig

PACKAGE = Path(fivefold.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "how_to_add.md"
KEYS = [key for key in base.outer_rules() if key != "smoothed_sgd"]


def rule_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(block for block in blocks if "OuterRule" in block)


@pytest.fixture(scope="module")
def smoothed(tmp_path_factory):
    """The rule of the page, defined in a scratch module and forgotten afterwards."""
    file = tmp_path_factory.mktemp("scratch") / "scratch_rule.py"
    file.write_text(rule_of_the_page())
    spec = importlib.util.spec_from_file_location("scratch_rule", file)
    scratch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scratch)
    yield scratch.SmoothedSGD
    del base._REGISTERED["smoothed_sgd"]


def test_a_rule_is_found_by_its_key_its_class_and_its_label(smoothed):
    assert optim.outer_rules()["smoothed_sgd"] is smoothed
    assert optim.SmoothedSGD is smoothed
    assert method_label(SyncConfig(method="smoothed_sgd", tau=4)) == "smoothed SGD (tau 4)"


def test_a_rule_brings_its_keys_of_the_configuration(smoothed):
    config = SyncConfig(method="smoothed_sgd", tau=4, outer_lr=0.5)
    assert config.rule() == smoothed(tau=4, outer_lr=0.5)
    assert SyncConfig(method="smoothed_sgd").outer_lr == 1.0
    with pytest.raises(ValueError, match="smoothed_sgd takes average_states, check_every_rounds"):
        SyncConfig(method="smoothed_sgd", clip=1.0)
    with pytest.raises(ValueError, match='"auto" needs a method that hides its rounds'):
        SyncConfig(method="smoothed_sgd", tau="auto")


@pytest.mark.usefixtures("smoothed")
def test_the_planner_prices_a_rule_by_what_it_says():
    config = TrainConfig(sync={"method": "smoothed_sgd", "tau": 4})
    device = as_sent(load_cluster("cpu-lab"), config).device
    assert device.outer_state_bytes == 12  # anchor, payload, average
    assert device.outer_window == 0  # all ranks wait


def test_the_rule_of_the_page_does_what_it_says(smoothed):
    """Rank r moves by r + 1 a step: a_n = (1 - keep^n) d, and the anchor by the mean of all a."""
    tau, rounds, keep = 2, 5, 0.25

    def work(transport):
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = smoothed(tau=tau, smoothing=keep)
        sync = optim.OuterSync(model, optimizer, rule=rule, transport=transport)
        for _ in range(tau * rounds):
            model.weight.grad = torch.full_like(model.weight, transport.rank + 1.0)
            optimizer.step()
            sync.step()
        held = sync.state_dict()
        sync.finalize()
        return model.weight.detach(), held

    expected = -sum(1.5 * tau * (1 - keep**n) for n in range(1, rounds + 1))
    for rank, (weight, held) in enumerate(run_world(2, work)):
        assert weight == pytest.approx(torch.full((1, 3), expected), abs=1e-12)
        entries = held["fragments"]["0"]["tensors"]["weight"]
        average = (rank + 1) * tau * (1 - keep**rounds)
        assert entries["average"] == pytest.approx(torch.full((1, 3), average), abs=1e-12)


def test_a_key_belongs_to_one_rule(smoothed):
    with pytest.raises(ConfigurationError, match="'co2' exists already"):
        type("Other", (optim.OuterRule,), {"key": "co2"})
    assert optim.outer_rules()["co2"] is optim.CO2
    assert smoothed.key in optim.outer_rules()


ASKED = """
import sys
import fivefold.cli._main as entry
from fivefold import optim
from fivefold.report.format import method_colours
from fivefold.train.config import SyncConfig
config = SyncConfig(method="smoothed_sgd", tau=4, smoothing=0.25)
assert config.rule() == optim.SmoothedSGD(tau=4, smoothing=0.25)
assert SyncConfig(method="smoothed_sgd").smoothing == 0.5
asked = SyncConfig.model_fields["smoothing"]
assert asked.description == "share that is kept of earlier rounds"
assert "smoothed_sgd" in SyncConfig.model_json_schema()["properties"]["method"]["enum"]
assert method_colours()["smoothed_sgd"] == "#336699"
assert "torch" not in sys.modules
sys.argv = ["fivefold", "train", "--help"]
entry.main()
"""


def test_one_file_is_all_that_a_new_rule_needs(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fivefold", ignore=shutil.ignore_patterns("__pycache__"))
    text = rule_of_the_page().replace(
        "from fivefold.optim import", "from fivefold.optim._rules.base import"
    )
    (tmp_path / "fivefold" / "optim" / "_rules" / "smoothed_sgd.py").write_text(text)
    told = subprocess.run(
        [sys.executable, "-c", ASKED], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-800:]
    assert "smoothed_sgd" in told.stdout


def names_in(node):
    """The strings of a table: keys of a dict, members of a list, a tuple, a set or a Literal."""
    members = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return {m.value for m in members if isinstance(m, ast.Constant) and isinstance(m.value, str)}


def second_tables(text, names):
    """Lines of literals that name three or more of what a registry has."""
    kinds = ast.Dict | ast.List | ast.Tuple | ast.Set
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and len(names_in(node) & names) >= 3
    ]


def test_no_second_table_has_the_rules():
    rules = base.outer_rules()
    labels = {rules[key].name for key in KEYS if rules[key].name != rules[key].__name__}
    names, found = {*KEYS, *labels}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if sum(f'"{name}"' in text for name in names) >= 3:
            found[str(path.relative_to(PACKAGE))] = second_tables(text, names)
    assert not any(found.values()), found


@pytest.mark.parametrize("form", ["{%s: 1, %s: 2, %s: 3}", "(%s, %s, %s)", "Literal[%s, %s, %s]"])
def test_a_second_table_would_be_seen(form):
    for three in itertools.islice(itertools.combinations(KEYS, 3), 5):
        assert second_tables(form % tuple(map(repr, three)), set(KEYS)) == [1]
