"""Table ``[logging]``: what loggers get, and that none of them can hold up or end a run."""

import logging
import sys
import threading
import types

import pytest

from fivefold.errors import UnsupportedError
from fivefold.runs import MetricsWriter, loggers
from fivefold.runs.loggers import Loggers, LoggingConfig, require_loggers


def write_run(folder, config, *, resumed_step=None, steps=(2, 4), reason="finished"):
    settings = {"run": {"steps": 4}, "data": {"path": folder}}
    told = Loggers(config, folder, settings=settings, resumed_step=resumed_step)
    writer = MetricsWriter(folder / "metrics.jsonl", resumed_step=resumed_step, loggers=told)
    for step in steps:
        writer.write(
            "train", step=step, loss=1.0 / step, more={"x": step, "name": "a", "load": [1]}
        )
    if reason is not None:
        writer.write("end", step=steps[-1], reason=reason)
    writer.close()


@pytest.fixture
def fake_wandb(monkeypatch):
    """A stand-in for the package: notes what it is told, and does what the test says."""
    told = []

    def init(**options):
        told.append(("init", options["id"], options["project"], options["name"]))
        return types.SimpleNamespace(
            log=lambda numbers, step: told.append(("log", step, numbers)),
            finish=lambda exit_code: told.append(("finish", exit_code)),
        )

    module = types.ModuleType("wandb")
    module.__dict__.update(init=init, Settings=dict, told=told)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


WANDB = LoggingConfig(wandb="project")


def test_a_logger_gets_every_number_and_how_the_run_ended(tmp_path, fake_wandb):
    write_run(tmp_path / "first", WANDB)
    (_, own, project, name), *rest = fake_wandb.told
    assert (project, name, len(own)) == ("project", "first", 32)
    assert rest == [
        ("log", 2, {"train/loss": 0.5, "train/more/x": 2.0}),
        ("log", 4, {"train/loss": 0.25, "train/more/x": 4.0}),
        ("finish", 0),
    ]
    write_run(tmp_path / "second", WANDB, reason=None)  # an error ended it
    assert fake_wandb.told[-1] == ("finish", 1)


def test_a_resumed_run_goes_on_on_its_page_and_a_new_one_has_its_own(tmp_path, fake_wandb):
    write_run(tmp_path, WANDB, reason="stopped")
    write_run(tmp_path, WANDB, resumed_step=4, steps=(6,))
    write_run(tmp_path, WANDB)
    first, second, third = [item[1] for item in fake_wandb.told if item[0] == "init"]
    assert first == second != third


def test_a_failure_is_said_once_and_the_run_goes_on(tmp_path, fake_wandb, caplog):
    def refuse(_numbers, *, step):
        message = f"no server at step {step}"
        raise ConnectionError(message)

    failing = types.SimpleNamespace(log=refuse, finish=fake_wandb.told.append)
    fake_wandb.init = lambda **_options: failing
    write_run(tmp_path, WANDB, steps=(1, 2, 3, 4))
    (record,) = caplog.records
    assert record.getMessage() == (
        "logging.wandb failed: ConnectionError: no server at step 1; the run goes on without it, "
        "metrics.jsonl has all"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert fake_wandb.told == []


def test_a_logger_that_hangs_holds_up_nothing(tmp_path, fake_wandb, caplog, monkeypatch):
    monkeypatch.setattr(loggers, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(loggers, "_MOST_WAITING", 3)
    release = threading.Event()
    fake_wandb.init = lambda **_options: release.wait()
    for steps, why in (((1,), "within 0.1 s"), (range(1, 9), "has not taken its last 3 records")):
        caplog.clear()
        write_run(tmp_path, WANDB, steps=steps)
        assert [why in record.getMessage() for record in caplog.records] == [True]
    release.set()


def test_a_package_that_is_not_there_is_said_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()  # offline runs of before: no package
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UnsupportedError, match=r"logging\.wandb needs the package wandb") as error:
        require_loggers(WANDB)
    assert error.value.hint == "pip install 'fivefold[wandb]'"
    require_loggers(LoggingConfig())


def test_tensorboard_reads_what_was_written_and_resumed(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = LoggingConfig(tensorboard=True)
    write_run(tmp_path, board, steps=(2, 4, 6), reason="stopped")
    write_run(tmp_path, board, resumed_step=4, steps=(6, 8))
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert values == [(step, pytest.approx(1 / step)) for step in (2, 4, 6, 8)]


def test_mlflow_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = LoggingConfig(mlflow="experiment")
    write_run(tmp_path / "run", config, reason="stopped")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert (run.info.status, run.data.params["run.steps"]) == ("KILLED", "4")
    write_run(tmp_path / "run", config, resumed_step=4, steps=(6,))
    run = client.get_run(run.info.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(2, 0.5), (4, 0.25), (6, 1 / 6)]


def test_wandb_writes_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    caplog.set_level(logging.WARNING, logger="fivefold")
    write_run(tmp_path, WANDB)
    assert not caplog.records
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()
