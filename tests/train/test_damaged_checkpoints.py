"""Whatever happens to the files of a run, a resumed run is exact or refused, never wrong."""

import json
import logging
import os
import shutil
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import CheckpointError
from fivefold.train import TrainConfig, train
from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig, SyncConfig
from helpers.night import number_of

STEPS = 3
NEWEST, OLDER = "checkpoints/step-00000002", "checkpoints/step-00000001"
METRICS = "../../metrics.jsonl"
FILES = (".metadata", "__0_0.distcp", "manifest.json")


class Golden:
    """A run of three steps that was killed after the second, and two others like it."""

    def __init__(self, text_folder, root):
        self._text, self._root = text_folder, root
        self.work = root / "work"
        whole = train(self.config(root / "run"))
        self.expected = whole.parameters_sha256
        train(self.config(root / "seed", seed=1))
        train(self.config(root / "longer", steps=STEPS + 1, accumulation=2))
        for name in ("run", "seed", "longer"):
            for path in (root / name / "checkpoints").glob("step-*"):
                if int(path.name[5:]) >= STEPS:
                    shutil.rmtree(path)

    def config(self, output, *, seed=0, steps=STEPS, accumulation=1):
        every = {"checkpoint_every_steps": 1, "keep_checkpoints": 9, "validate_every_steps": 0}
        return TrainConfig(
            run=RunConfig(output=output, device="cpu", seed=seed, steps=steps, **every),
            data=DataConfig(
                path=str(self._text), cache=str(self._root / "cache"), sequence_length=8
            ),
            model=ModelConfig(layers=1, width=4, heads=1),
            optim=OptimConfig(
                batch_size=1,
                warmup_steps=1,
                validation_batches=1,
                precision="fp32",
                accumulation=accumulation,
            ),
            sync=SyncConfig(method="none"),
        )

    def fresh(self):
        """A copy of the killed run to damage."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self._root / "run", self.work)
        return self.work

    def other(self, name):
        return self._root / name

    def resume(self):
        """Digest of the resumed run; None where it is refused."""
        try:
            return train(self.config(self.work)).parameters_sha256
        except CheckpointError:
            return None


@pytest.fixture(scope="module")
def golden(text_folder, tmp_path_factory):
    return Golden(text_folder, tmp_path_factory.mktemp("golden"))


def flip(path, where, bit):
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)


def truncate(path, where, _bit):
    os.truncate(path, where % path.stat().st_size)


def zero(path, where, _bit):
    content = bytearray(path.read_bytes())
    begin = where % len(content)
    content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    path.write_bytes(content)


def grow(path, where, _bit):
    with path.open("ab") as file:
        file.write(bytes(1 + where % 100))


def remove(path, _where, _bit):
    path.unlink()


def to_fifo(path, _where, _bit):
    path.unlink()
    os.mkfifo(path)


def to_folder(path, _where, _bit):
    path.unlink()
    path.mkdir()


DAMAGES = {
    function.__name__: function
    for function in (flip, truncate, zero, grow, remove, to_fifo, to_folder)
}
AT = st.integers(0, 1 << 20)
ANY_DAMAGE = st.tuples(st.sampled_from(sorted(DAMAGES)), AT, st.integers(0, 7))


FIXTURE = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


@settings(max_examples=number_of(15, 1000), **FIXTURE)
@given(st.sampled_from((*FILES, METRICS)), ANY_DAMAGE)
def test_damage_to_the_newest_is_noticed(golden, name, damage):
    kind, where, bit = damage
    if name == METRICS and kind == "to_folder":  # which cannot be written to either
        kind = "to_fifo"
    DAMAGES[kind](golden.fresh() / NEWEST / name, where, bit)
    # The one before it is whole: there is always something to go on from.
    assert golden.resume() == golden.expected


@settings(max_examples=number_of(20, 1000), **FIXTURE)
@given(st.lists(st.tuples(st.sampled_from((NEWEST, OLDER)), st.sampled_from(FILES), ANY_DAMAGE)))
def test_damage_to_both_is_exact_or_refused(golden, damages):
    root = golden.fresh()
    for folder, name, (kind, where, bit) in damages:
        path = root / folder / name
        if path.is_file() and path.stat().st_size:
            DAMAGES[kind](path, where, bit)
    assert golden.resume() in {golden.expected, None}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("source", ["older", "seed", "longer"])
def test_a_file_of_another_step_or_run_is_noticed(golden, name, source):
    root = golden.fresh()
    other = root / OLDER if source == "older" else golden.other(source) / NEWEST
    shutil.copyfile(other / name, root / NEWEST / name)
    assert golden.resume() == golden.expected


@pytest.mark.parametrize("source", ["older", "seed", "longer"])
def test_a_whole_checkpoint_of_another_step_or_run_is_exact_or_refused(golden, source):
    root = golden.fresh()
    other = root / OLDER if source == "older" else golden.other(source) / NEWEST
    copy = root / "copy"
    shutil.copytree(other, copy)
    shutil.rmtree(root / NEWEST)
    copy.rename(root / NEWEST)
    assert golden.resume() == (golden.expected if source == "older" else None)


@pytest.mark.parametrize("kept", [[], [".metadata"], ["__0_0.distcp"]], ids=["none", "head", "own"])
def test_a_manifest_that_names_too_little_is_noticed(golden, kept):
    path = golden.fresh() / NEWEST / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: manifest["files"][name] for name in kept}
    path.write_text(json.dumps(manifest))
    assert golden.resume() == golden.expected


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "1", '"schema"', "9" * 5000, "\0"])
def test_a_manifest_that_is_none(golden, text):
    (golden.fresh() / NEWEST / "manifest.json").write_text(text)
    assert golden.resume() == golden.expected


class StopAt(logging.Handler):
    """Ask a run to stop when it says that it has done a step."""

    def __init__(self, step):
        super().__init__()
        self._words = f"step {step}/"

    def emit(self, record):
        if self._words in record.getMessage():
            signal.raise_signal(signal.SIGTERM)


def test_a_new_checkpoint_is_not_removed_for_a_damaged_newer_one(golden):
    root = golden.fresh()
    (root / NEWEST / "manifest.json").unlink()
    for step in (5, 7):  # as of a run of more steps that went on
        shutil.copytree(root / NEWEST, root / f"checkpoints/step-{step:08d}")
    shutil.rmtree(root / NEWEST)
    config = golden.config(golden.work)
    run = config.run.model_copy(update={"keep_checkpoints": 1, "line_every_s": 1e-9})
    logger, handler = logging.getLogger("fivefold.runs"), StopAt(2)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert train(config.model_copy(update={"run": run})).reason == "stopped"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    left = sorted(path.name[-1] for path in (root / "checkpoints").iterdir())
    assert left == ["2", "5", "7"]
    assert golden.resume() == golden.expected


def test_each_skipped_checkpoint_is_named_with_its_reason(golden, caplog):
    (golden.fresh() / NEWEST / "manifest.json").unlink()
    assert golden.resume() == golden.expected
    assert "step-00000002 is not whole: manifest.json is missing; skipped" in caplog.text
    assert "resuming from step-00000001" in caplog.text
