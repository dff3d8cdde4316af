"""A preset says what card it is, and a plan what it is a prediction of."""

import json
import logging
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.errors import ConfigurationError
from fivefold.strategy import load_cluster, named_clusters
from fivefold.strategy.cluster import named_cluster_of

JOB = """model = "llama3-8b"
gpus = 8
global_batch = 8
[plan]
data = 8
zero = 3
recompute = "full"
"""


@pytest.mark.parametrize("name", named_clusters())
def test_every_preset_says_what_it_is_of(name):
    device = load_cluster(name).device
    assert device.facts["hardware"]
    assert set(device.facts) == {"device", "hardware", "stack", "release", "released"}
    for text in filter(None, device.facts.values()):
        assert text in device.of


def test_an_ordinary_h100_has_80_gb_and_the_published_one_does_not():
    ordinary, published = (load_cluster(f"h100-{gb}gb-torchtitan").device for gb in (80, 96))
    assert ordinary.memory_bytes == 80 * 2**30  # data sheet of the SXM card
    assert ordinary.memory_bandwidth_bytes_per_s == 3350e9
    assert "500 W" in published.of
    assert "700 W" in ordinary.of


def test_the_old_name_works_and_says_the_new_ones(caplog):
    with caplog.at_level(logging.WARNING):
        old = load_cluster("h100-torchtitan:16")
    new = load_cluster("h100-96gb-torchtitan:16")
    assert (old.device, old.fabric, old.num_gpus) == (new.device, new.fabric, new.num_gpus)
    assert "h100-96gb-torchtitan: H100 with 96 GB" in caplog.text
    assert "h100-80gb-torchtitan" in caplog.text
    assert "h100-torchtitan" not in named_clusters()


def test_another_card_is_not_called_as_its_base(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-96gb-torchtitan"\n[device]\nmemory = "80 GiB"\n')
    assert load_cluster(path).device.facts["hardware"] == "H100 with 80 GiB"


def test_a_plan_names_device_stack_release_and_date(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    words = ["plan", str(job), "--cluster", "h100-nemo"]
    of = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["of"]
    assert of == {
        "device": "h100-nemo", "hardware": "H100 with 80 GiB", "stack": "nemo-25.04",
        "release": "25.04", "released": "2025-05",
    }  # fmt: skip
    text = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "h100-nemo: H100 with 80 GiB; nemo-25.04 (25.04, 2025-05)" in text


@pytest.mark.parametrize(
    ("card", "name"),
    [  # as torch.cuda.get_device_name() says it
        ("NVIDIA H100 80GB HBM3", "h100-80gb-torchtitan"),
        ("NVIDIA H200", "h200-nemo"),
        ("NVIDIA B200", "b200-nemo"),
        ("NVIDIA GB200", "gb200-nemo"),
        ("NVIDIA GB300", "gb300-bridge"),
        ("A100-SXM4-80GB", "a100-fsdp"),  # older drivers
        ("Tesla V100-SXM2-16GB", "v100-dlperf"),
    ],
)
def test_a_measured_card_starts_from_its_own_constants(card, name):
    assert named_cluster_of(card) == name
    size = re.search(r"(\d+)GB", card)
    if size:
        memory = load_cluster(name).device.memory_bytes
        assert memory == pytest.approx(int(size[1]) * 2**30, rel=0.08)


@pytest.mark.parametrize("card", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA L40S", "H10"])
def test_another_card_is_asked_about(card):
    with pytest.raises(ConfigurationError, match=f"constants of '{card}' are not known.*--base"):
        named_cluster_of(card)


def test_every_gpu_that_is_shipped_is_known_by_its_card_once():
    folder = files("fivefold.strategy") / "devices"
    tables = {path.stem: tomllib.loads(path.read_text()) for path in Path(str(folder)).iterdir()}
    cards = [card for table in tables.values() for card in table.get("cards", ())]
    assert len({card.lower().removeprefix("nvidia ") for card in cards}) == len(cards)
    families = {name.partition("-")[0] for name, table in tables.items() if "cards" in table}
    assert families == {name.partition("-")[0] for name in tables} - {"cpu"}
