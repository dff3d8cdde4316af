"""Table ``[logging]``: the records of metrics.jsonl in TensorBoard, Weights & Biases and MLflow.

Each takes its records in a thread of its own: a server that is slow or gone costs the run nothing.
Where a run was resumed, the page of the run before goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UnsupportedError
from fivefold.files import write_atomically
from fivefold.runs.config import Section, Text

_LOG = logging.getLogger(__name__)
_MOST_WAITING = 10_000
_MOST_AT_ONCE = 25
_PATIENCE_S = 60.0  # MLflow takes 30 s to make its tables on a small machine
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE = 1000, 100  # what MLflow's servers take
_LONGEST_PARAMETER = 500
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_Record = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class _Logger:
    """Receiver of records, a step's numbers each, which is told how the run ended."""

    log: Callable[[list[_Record]], None]
    end: Callable[[str], None]  # "finished", "stopped" or "failed"


class LoggingConfig(Section):
    """Table ``[logging]``: who gets the records of metrics.jsonl as well."""

    tensorboard: bool = False
    """also write TensorBoard event files, to tensorboard/ in the run's folder"""
    wandb: Text | None = None
    """project in Weights & Biases; WANDB_MODE=offline writes to wandb/ in the run's folder alone"""
    mlflow: Text | None = None
    """experiment in MLflow; MLFLOW_TRACKING_URI says where it is kept"""

    def wanted(self) -> list[str]:
        """Return the names of the packages that are asked for."""
        return [name for name in _OPENERS if getattr(self, name)]


def require_loggers(config: LoggingConfig) -> None:
    """Check that the packages of ``[logging]`` are installed."""
    for name in config.wanted():
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            message = f"logging.{name} needs the package {name}, which is not installed"
            raise UnsupportedError(message, hint=f"pip install 'fivefold[{name}]'")


class Loggers:
    """Hand the numbers of a run's records to the loggers of a configuration.

    Args:
        config: Which loggers.
        folder: The run's folder; its name is the run's.
        settings: The whole configuration, shown beside the curves.
        resumed_step: Step that the run begins from; None for a new run.
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        resumed_step: int | None,
    ) -> None:
        plain = json.loads(json.dumps(settings, default=str))
        self._threads = [
            _LoggerThread(
                name,
                functools.partial(
                    _OPENERS[name], getattr(config, name), folder.resolve(), plain, resumed_step
                ),
            )
            for name in config.wanted()
        ]
        self._how = "failed"

    def write(self, event: str, *, step: int, values: Mapping[str, Any]) -> None:
        """Hand on the numbers of one event as ``event/key``."""
        if event == "end":
            self._how = str(values["reason"])
        if not self._threads:
            return
        flat = _flat(values, "/", f"{event}/")
        numbers = {name: float(v) for name, v in flat.items() if isinstance(v, int | float)}
        for thread in self._threads if numbers else ():
            thread.put((step, numbers))

    def close(self) -> None:
        """Wait until all have taken their records, or have had their time."""
        for thread in self._threads:
            thread.put(self._how)
        end_s = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.end(end_s)


def _flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, separator, f"{prefix}{key}{separator}")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


class _LoggerThread(threading.Thread):
    """One logger, opened and used here alone; its first failure is said, and is its last."""

    def __init__(self, name: str, opener: Callable[[], _Logger]) -> None:
        super().__init__(name=f"logging.{name}", daemon=True)
        self._open = opener
        self._waiting: queue.Queue[_Record | str] = queue.Queue()
        self._given_up = False
        self.start()

    def put(self, item: _Record | str) -> None:
        """Hand a record, or how the run ended, to the thread."""
        if self._waiting.qsize() > _MOST_WAITING:
            self._give_up(f"has not taken its last {_MOST_WAITING} records")
        if not self._given_up:
            self._waiting.put(item)

    def end(self, until_s: float) -> None:
        """Wait for the last records until a time, and no longer."""
        self.join(max(until_s - time.monotonic(), 0.0))
        if self.is_alive():
            self._give_up(f"did not take the last records within {_PATIENCE_S:g} s")

    def run(self) -> None:
        """Open the logger and log what comes until the end."""
        try:
            logger = self._open()
            while not self._given_up:
                items = [self._waiting.get()]
                while len(items) < _MOST_AT_ONCE and not self._waiting.empty():
                    items.append(self._waiting.get())
                logger.log([item for item in items if not isinstance(item, str)])
                if isinstance(items[-1], str):
                    logger.end(items[-1])
                    return
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run goes on
            self._give_up(f"failed: {type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            _LOG.warning("%s %s; the run goes on without it, metrics.jsonl has all", self.name, why)


def _run_id(folder: Path, *, resumed: bool, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id of the page of this run, and whether it is that of the run before."""
    file = folder / "run_id"
    if resumed and file.is_file():
        return file.read_text(encoding="utf-8").strip(), True
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (found := make()))
    return found, False


def _open_tensorboard(
    _on: bool,  # noqa: FBT001 - as the others
    folder: Path,
    settings: dict[str, Any],
    resumed: int | None,
) -> _Logger:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - needs the extra

    purge = None if resumed is None else resumed + 1
    board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    board.add_text("config", f"```json\n{json.dumps(settings, indent=1)}\n```", resumed or 0)

    def log(records: list[_Record]) -> None:
        for step, numbers in records:
            for name, value in numbers.items():
                board.add_scalar(name, value, step)

    return _Logger(log, end=lambda _: board.close())


def _open_wandb(
    project: str, folder: Path, settings: dict[str, Any], resumed: int | None
) -> _Logger:
    import wandb  # noqa: PLC0415 - needs the extra

    own, _ = _run_id(folder / "wandb", resumed=resumed is not None, make=lambda: uuid.uuid4().hex)
    run = wandb.init(
        project=project,
        name=folder.name,
        id=own,
        resume="allow",
        dir=str(folder),
        config=settings,
        settings=wandb.Settings(console="off", silent=True, init_timeout=60, login_timeout=1),
    )

    def log(records: list[_Record]) -> None:
        for step, numbers in records:
            run.log(numbers, step=step)

    return _Logger(log, end=lambda how: run.finish(exit_code=int(how == "failed")))


def _open_mlflow(
    experiment: str, folder: Path, settings: dict[str, Any], resumed: int | None
) -> _Logger:
    # Its own waits add up to minutes; records wait in a queue here.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    from mlflow import MlflowClient  # noqa: PLC0415 - needs the extra
    from mlflow.entities import Metric, Param  # noqa: PLC0415

    client = MlflowClient()

    def make() -> str:
        found = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if found is None else found.experiment_id
        created: str = client.create_run(number, run_name=folder.name).info.run_id
        return created

    own, known = _run_id(folder / "mlflow", resumed=resumed is not None, make=make)
    if known:
        client.update_run(own, status="RUNNING")
    else:
        flat = _flat(settings, ".")
        parameters = [Param(k, str(v)[:_LONGEST_PARAMETER]) for k, v in flat.items()]
        for at in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            client.log_batch(own, params=parameters[at : at + _PARAMETERS_AT_ONCE])

    def log(records: list[_Record]) -> None:
        now_ms = int(time.time() * 1e3)
        metrics = [Metric(k, v, now_ms, step) for step, found in records for k, v in found.items()]
        for at in range(0, len(metrics), _METRICS_AT_ONCE):
            client.log_batch(own, metrics[at : at + _METRICS_AT_ONCE])

    return _Logger(log, end=lambda how: client.set_terminated(own, _MLFLOW_STATUS[how]))


_OPENERS: dict[str, Callable[[Any, Path, dict[str, Any], int | None], _Logger]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
