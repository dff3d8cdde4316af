"""torchtitan's trainer with an outer rule between the replicas of its HSDP configuration.

Everything inside a replica (FSDP2, tensor, context, pipeline and expert parallelism) is
torchtitan's own: it is shown a world that ends at the replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from fivefold.errors import CheckpointError, ConfigurationError, optional_module
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._rules.delayed_gradients import DelayedGradients
from fivefold.optim._sync import OuterSync

_LOG = logging.getLogger(__name__)

_STATE = "outer_sync"
"""Key of the replicas' own states in torchtitan's checkpoints."""

# What torchtitan counts over all replicas: 0.3.0's batch, and the tokens of its main branch.
_GLOBAL_SIZES = ("global_batch_size", "num_tokens_per_train_step")


def with_outer_sync(config: Any, rule: OuterRule, options: Mapping[str, Any]) -> Any:
    """Return a copy of a ``Trainer.Config`` that builds a trainer with ``rule``."""
    tyro = optional_module("tyro", extra="torchtitan", use="torchtitan")
    owner: Any = getattr(config, "_owner", None)
    trainer = importlib.import_module("torchtitan.trainer").Trainer
    if not (isinstance(owner, type) and issubclass(owner, trainer)):
        message = f"a Trainer.Config of torchtitan is needed; got {type(config).__name__}"
        raise ConfigurationError(message, hint="take one of its config_registry")
    if isinstance(rule, DelayedGradients):
        message = "DelayedGradients changes gradients that torchtitan has clipped already"
        raise ConfigurationError(message, hint="take a rule of parameters, such as DelayCorrected")
    suppressed: Hashable = tyro.conf.Suppress
    base: Any = type(config)
    kind = _config_class(owner, base, suppressed)
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return kind(**values, outer_sync=OuterSettings(rule, dict(options)))


@dataclasses.dataclass(frozen=True)
class OuterSettings:
    """What ``OuterSync`` is made with."""

    rule: OuterRule
    options: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return what torchtitan's log and its trackers show."""
        return {"rule": repr(self.rule), **{name: repr(v) for name, v in self.options.items()}}


@functools.cache
def _config_class(owner: type, config: type, suppressed: Hashable) -> type:
    """Return the configuration class of ``owner`` with an outer rule, which no flag changes."""
    field = dataclasses.field(default=None)
    made = dataclasses.make_dataclass(
        "Config",
        [("outer_sync", Annotated[Any, suppressed], field)],
        bases=(config,),
        kw_only=True,
        slots=True,
    )
    # Its own __init_subclass__ makes build() of a nested Config return the class around it.
    type(f"OuterSync{owner.__name__}", (_OuterSyncTrainer, owner), {"Config": made})
    return made


class _OuterSyncTrainer:
    """Overrides of torchtitan's ``Trainer``, whose own methods come after these."""

    # torchtitan's:
    config: Any
    step: int
    model_parts: list[torch.nn.Module]
    optimizers: Any
    lr_schedulers: Any
    checkpointer: Any
    metrics_processor: Any

    _sync: OuterSync
    _finished = False
    workers: DeviceMesh

    def __init__(self, config: Any) -> None:
        replicas = config.parallelism.data_parallel_replicate_degree
        if replicas < 2:
            message = f"data_parallel_replicate_degree={replicas}: there are no replicas"
            hint = "set --parallelism.data_parallel_replicate_degree to their number, say of nodes"
            raise ConfigurationError(message, hint=hint)
        if config.parallelism.pipeline_parallel_degree > 1:
            message = "pipeline stages would each judge their own part of a replica's payload"
            hint = (
                "set --parallelism.pipeline_parallel_degree 1; split with FSDP2 or tensor parallel"
            )
            raise ConfigurationError(message, hint=hint)
        training = dataclasses.replace(config.training)
        for name in _GLOBAL_SIZES:
            whole = getattr(training, name, -1)
            if whole > 0 and whole % replicas:
                message = f"{name}={whole} does not divide among {replicas} replicas"
                raise ConfigurationError(message, hint=f"set --training.{name} to a multiple")
            if whole > 0:
                setattr(training, name, whole // replicas)
        if not getattr(training, "disable_cuda_graphs", True):
            _LOG.warning("CUDA graphs are off: outer updates between replays have not been tried")
            training.disable_cuda_graphs = True
        if not getattr(config.dataloader, "infinite", True):
            message = "the data end, for some replicas sooner, while the others wait for them"
            raise ConfigurationError(message, hint="set --dataloader.infinite, and end by steps")
        shared = _SharedData(config.dataloader, self)
        super().__init__(dataclasses.replace(config, training=training, dataloader=shared))  # type: ignore[call-arg]
        options = self.config.outer_sync
        self._sync = OuterSync(
            self._module,
            list(self.optimizers),
            rule=options.rule,
            process_group=self.workers.get_group(),
            **options.options,
        )
        if self.checkpointer.enable:
            self._own = _OwnState(self._module, self.optimizers, self._sync, self.workers)
            self._own.join(self.checkpointer)
        # Between the optimizer's step and the schedule's: rules in units of the learning rate read
        # that of the step.
        self.lr_schedulers.step = functools.partial(self._step_rule, self.lr_schedulers.step)
        self.metrics_processor.log = functools.partial(self._log, self.metrics_processor.log)
        if config.validator.enable:
            validate = self.validator.validate  # type: ignore[attr-defined]
            self.validator.validate = self._at_the_anchor(validate)  # type: ignore[attr-defined]

    def init_distributed(self) -> Any:
        """Return the dimensions of one replica, in meshes that end at it."""
        dims: Any = super().init_distributed()  # type: ignore[misc]  # checks the degrees
        replicas = dims.dp_replicate
        inner = dataclasses.replace(dims, dp_replicate=1, world_size=dims.world_size // replicas)
        inner.build_mesh = functools.partial(self._build_mesh, inner, replicas)
        return inner

    def _build_mesh(self, dims: Any, replicas: int) -> Any:
        """Build torchtitan's meshes over this replica's ranks."""
        # It unflattens them all from one mesh of the world; this is that one.
        module: Any = sys.modules[type(dims).__module__]
        whole = module.init_device_mesh

        def of_replica(device: str, shape: tuple[int], *, mesh_dim_names: tuple[str]) -> DeviceMesh:
            names = ("replica", *mesh_dim_names)
            mesh: DeviceMesh = whole(device, (replicas, *shape), mesh_dim_names=names)
            self.workers = mesh["replica"]
            return mesh[mesh_dim_names[0]]

        module.init_device_mesh = of_replica
        try:
            return type(dims).build_mesh(dims)
        finally:
            module.init_device_mesh = whole

    def _step_rule(self, step_schedule: Callable[[], None]) -> None:
        self._sync.step()
        step_schedule()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Take a local step, and the outer rule's; after the last one all replicas are equal."""
        super().train_step(data_iterator)  # type: ignore[misc]
        if self.step >= self.config.training.steps:
            self._finish()

    def train(self) -> None:
        """Train, and bring all work together where that ended before its last step."""
        super().train()  # type: ignore[misc]
        self._finish()

    def close(self) -> None:
        """Let the engine go, too."""
        if hasattr(self, "_sync"):  # nothing went wrong before
            self._sync.close()
        super().close()  # type: ignore[misc]

    def _finish(self) -> None:
        if not self._finished:
            self._sync.finalize()
            self._finished = True

    @property
    def _module(self) -> torch.nn.Module:
        parts = self.model_parts
        return parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)

    def _at_the_anchor(self, method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            with self._sync.global_parameters():
                return method(*arguments, **options)

        return wrapped

    def _log(self, log: Any, *arguments: Any, **options: Any) -> None:
        """Add what the engine measured to torchtitan's metrics."""
        extra = dict(options.get("extra_metrics") or {})
        options["extra_metrics"] = extra | _metrics(self._sync)
        log(*arguments, **options)


def _metrics(sync: OuterSync) -> dict[str, float]:
    statistics = sync.statistics()
    names = ("merged_rounds", "exposed_wait_s", "in_flight_s", "sent_bytes", "tau")
    return {f"{_STATE}/{name}": getattr(statistics, name) for name in names}


class _SharedData:
    """A data loader's configuration, each replica of which reads its own part."""

    def __init__(self, config: Any, trainer: Any) -> None:
        self._config, self._trainer = config, trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has none yet
            raise AttributeError(name)
        return getattr(self._config, name)

    def traverse(self, config_cls: type, **options: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the nested configurations; what replaces the loader's own stands in here."""
        for name, config, parent, field in self._config.traverse(config_cls, **options):
            own = parent is None
            yield name, config, self if own else parent, "_config" if own else field

    def build(self, *, dp_world_size: int, dp_rank: int, **options: Any) -> Any:
        """Build the loader for rank ``dp_rank`` of this replica's ``dp_world_size``."""
        workers = self._trainer.workers
        place = workers.get_local_rank() * dp_world_size + dp_rank
        return self._config.build(
            dp_world_size=dp_world_size * workers.size(), dp_rank=place, **options
        )


class _OwnState:
    """What a rank of a replica adds to torchtitan's checkpoints, whose weights are the anchor's.

    Its weights, its optimizer's state and the engine's, under names of its own: torchtitan keeps
    one replica's of what it takes for copies.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Any, sync: OuterSync, workers: DeviceMesh
    ) -> None:
        self._model, self._optimizers, self._sync = model, optimizers, sync
        self._replica = f"replica{workers.get_local_rank()}_of_{workers.size()}"
        self._rank = f"rank{dist.get_rank()}_of_{dist.get_world_size()}"
        self._saving: contextlib.ExitStack | None = None
        self._captured: dict[str, Any] | None = None
        self._whole_is_saved = self._at_the_anchor = False

    def join(self, checkpointer: Any) -> None:
        """Have ``checkpointer`` save and load it."""
        if not hasattr(checkpointer, "async_mode"):
            message = f"{type(checkpointer).__name__} does not say when weights have been copied"
            raise ConfigurationError(message, hint="use torchtitan's CheckpointManager.Config")
        checkpointer.states[_STATE] = self
        for name in ("load", "save"):
            wrapped = functools.partial(getattr(self, f"_{name}"), checkpointer)
            setattr(checkpointer, name, functools.partial(wrapped, getattr(checkpointer, name)))
        weights = checkpointer.states["model"]
        weights.state_dict = functools.partial(self._weights, weights.state_dict)

    def _save(self, checkpointer: Any, save: Any, curr_step: int, *, last_step: bool) -> bool:
        self._whole_is_saved = not (last_step and checkpointer.last_save_model_only)
        try:
            with contextlib.ExitStack() as self._saving:
                saved: bool = save(curr_step, last_step=last_step)
                if self._at_the_anchor:
                    checkpointer.maybe_wait_for_staging()  # before other weights are put back
        finally:
            self._saving = self._captured = None
            self._at_the_anchor = False
        return saved

    def _weights(self, state_dict: Any) -> Any:
        """Return the weights that are saved or filled; to be saved, those all replicas share."""
        if self._saving is not None and not self._at_the_anchor:
            self._captured = self._whole() if self._whole_is_saved else None
            self._saving.enter_context(self._sync.global_parameters())
            self._at_the_anchor = True
        return state_dict()

    def _load(self, _: Any, load: Any, step: int = -1) -> bool:
        self._captured = None
        try:
            loaded: bool = load(step)
        except CheckpointException as error:
            if _STATE not in str(error):
                raise
            message = f"this checkpoint has no {_STATE} state of {self._rank}"
            hint = (
                "resume on as many ranks as saved it, or go on from its weights with "
                f"--checkpoint.exclude_from_loading {_STATE},dataloader"
            )
            raise CheckpointError(message, hint=hint) from error
        if self._captured is None:
            self._sync.take_weights()  # if some were loaded
        else:
            self._put(self._captured)
        self._captured = None
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved or to be filled."""
        return self._captured or self._whole()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it until torchtitan has loaded its own."""
        self._captured = state

    def _whole(self) -> dict[str, Any]:
        # Its ranks have parts (DTensors) of one replica's weights and moments; what the engine
        # keeps is plain tensors of one rank.
        replica = {"model": _copied(self._model.state_dict())}  # the anchor takes their place
        moments = self._optimizers.state_dict()
        # While they are filled torchtitan fills the live ones with what it kept, of one replica.
        replica["optimizer"] = moments if self._saving is not None else _copied(moments)
        return {self._replica: replica, self._rank: self._sync.state_dict()}

    def _put(self, state: dict[str, Any]) -> None:
        replica = state[self._replica]
        self._model.load_state_dict(replica["model"])  # its hooks join what they split
        self._optimizers.load_state_dict(replica["optimizer"])
        self._sync.load_state_dict(state[self._rank])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value, state
    )
    return copied
