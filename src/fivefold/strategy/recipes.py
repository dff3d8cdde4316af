"""Recipes of other programs, checked before anyone waits for a GPU: are they valid, do they fit.

Each is read by its program's own words and rules, priced as every plan is, and judged with the
account of what was read: what something assumed or left out could turn over is "unknown".
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.files import read_text
from fivefold.reading import Reading
from fivefold.strategy._recipes.automodel import read_automodel
from fivefold.strategy._recipes.megatron import read_megatron
from fivefold.strategy._recipes.schemas import (
    Found,
    Program,
    UnreadableError,
    recognise,
    recognise_registry,
)
from fivefold.strategy._recipes.told import RefusedError, Told, UnknownError
from fivefold.strategy._recipes.torchtitan import read_torchtitan
from fivefold.strategy.cluster import Cluster
from fivefold.strategy.cost import PlanPrediction, evaluate_plan
from fivefold.strategy.job import job_from_table
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan
from fivefold.strategy.search import search_plans
from fivefold.units import format_bytes

Status = Literal["ok", "invalid", "memory", "unknown", "no training"]
_ENDINGS = (".toml", ".yaml", ".yml", ".sh", ".py", ".txt")
_MOST_FILES = 10_000
_REGISTRY = "config_registry.py"  # of torchtitan, a recipe in each function
_LOG = logging.getLogger(__name__)
# What a value of a form that nobody foresaw raises.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class RecipeVerdict:
    """Findings about one recipe.

    Args:
        path: The file.
        program: Whose recipe it is.
        status: "ok"; "invalid" where the program would refuse it; "memory" where it does not fit;
            "unknown" where it says too little to tell, or where what was assumed or left out could
            turn the verdict over; "no training" for servers, conversions and the like.
        message: What is wrong, or what was found.
        hint: What to do; empty where nothing is wrong.
        line: Of the file, counted from 1, that the message is about.
        prediction: Time and memory; None where it is invalid or could not be priced.
        model: What is trained; None where it is not known.
        reading: What was read, assumed and left out, and what is harmless.
    """

    path: Path
    program: Program
    status: Status
    message: str
    reading: Reading
    hint: str = ""
    line: int = 1
    prediction: PlanPrediction | None = None
    model: ModelSpec | None = None

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return what was assumed, in words."""
        return tuple(f"{note.name}: {note.value}" for note in self.reading.assumed)


def check_recipes(
    folder: Path,
    cluster: Cluster,
    *,
    model: ModelSpec | None = None,
    model_reading: Reading | None = None,
) -> Iterator[RecipeVerdict]:
    """Check every recipe of a folder at any depth, or one file, in the order of their names.

    Args:
        folder: Where recipes lie; what is none is passed over.
        cluster: Where they are to run.
        model: The model that the recipes train, where they neither say its sizes nor name one that
            is known.
        model_reading: The account of the file that it was read from: what is decisive there is so
            for the verdicts that it is used for.

    Raises:
        ConfigurationError: The folder holds no recipe.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    count = 0
    for path in [one for one in paths if one.suffix in _ENDINGS and one.is_file()][:_MOST_FILES]:
        judge = _check_registry if path.name == _REGISTRY else _check_file
        for verdict in judge(path, cluster, model, model_reading):
            # A registry that cannot be parsed has recipes, of which nobody knows how many.
            count += path.name != _REGISTRY or bool(verdict.reading.read)
            yield verdict
    if not count:
        raise ConfigurationError(
            f"{folder} holds no recipe of Megatron-LM, torchtitan, NeMo, Primus or fivefold",
            hint="looked at .toml, .yaml, .yml, .sh, .py and .txt files at any depth",
        )


def check_recipe(
    path: Path,
    cluster: Cluster,
    *,
    model: ModelSpec | None = None,
    model_reading: Reading | None = None,
) -> RecipeVerdict | None:
    """Check one file, as ``check_recipes`` does; None where it is no recipe, or has several."""
    return next(_check_file(path, cluster, model, model_reading), None)


def _check_registry(
    path: Path, cluster: Cluster, model: ModelSpec | None, model_reading: Reading | None
) -> Iterator[RecipeVerdict]:
    """Check each function of a registry; its name is at the head of what is said."""
    try:
        text = read_text(path)
        recipes = recognise_registry(path, text)
    except UnreadableError as error:
        yield _unreadable(path, error)
        return
    except FivefoldError as error:
        _LOG.warning("%s is passed over: %s", path, error.message)
        return
    except _ODD as error:  # nested too deep
        _LOG.warning("%s is passed over: %s", path, error)
        return
    for name, (line, found) in recipes.items():
        told = Told(
            found.reader, found.settings, path=path, cluster=cluster, model=model,
            model_reading=model_reading,
        )  # fmt: skip
        verdict = _judged(path, text, found, told)
        yield dataclasses.replace(verdict, message=f"{name}: {verdict.message}", line=line)


def _check_file(
    path: Path, cluster: Cluster, model: ModelSpec | None, model_reading: Reading | None
) -> Iterator[RecipeVerdict]:
    reading = Reading(str(path))
    try:
        text = read_text(path)
    except FivefoldError as error:  # no text at all
        _LOG.warning("%s is passed over: %s", path, error.message)
        return
    try:
        found = recognise(path, text)
    except UnreadableError as error:
        yield _unreadable(path, error)
        return
    except _ODD as error:  # of another form than any program's
        _LOG.warning("%s is passed over: %s", path, error)
        return
    if found is None:
        return
    if found.no_training:
        yield RecipeVerdict(
            path=path, program=found.program, status="no training", message=found.no_training,
            reading=reading,
        )  # fmt: skip
        return
    told = Told(
        found.reader, found.settings, path=path, cluster=cluster, model=model,
        model_reading=model_reading,
    )  # fmt: skip
    verdict = _judged(path, text, found, told)
    verdict.reading.log()
    yield verdict


def _unreadable(path: Path, error: UnreadableError) -> RecipeVerdict:
    return RecipeVerdict(
        path=path, program=error.program, status="unknown", message=error.message,
        hint=error.hint or "", reading=Reading(str(path)),
    )  # fmt: skip


def _judged(path: Path, text: str, found: Found, told: Told) -> RecipeVerdict:
    cluster = told.cluster
    try:
        if found.trouble is not None and (told.model is None or not found.sizes):
            raise UnknownError(found.trouble[0], hint=found.trouble[1])
        spec, plan = _fivefold(told, found) if found.table else _READERS[found.reader](told)
        cluster.require(plan.num_gpus)
    except FivefoldError as error:
        return _failed(path, text, found, told, error, refused=_refuses(error, found))
    except _ODD as error:
        message = f"a value has a form that is not read: {error}"
        odd = UnknownError(message, hint="see the program's own help for it")
        return _failed(path, text, found, told, odd, refused=False)
    try:
        prediction = evaluate_plan(spec, told.device, cluster.fabric, plan=plan)
    except FivefoldError as error:
        return _failed(path, text, found, told, error, refused=bool(found.table))
    total = prediction.memory.total_bytes
    for name, ends in told.spans.items():
        least, most = (_bytes(dataclasses.replace(spec, **end), plan, told) for end in ends)
        told.widen(name, (min(least or 0.0, total) / total, max(most or math.inf, total) / total))
    if told.elastic == "another":
        told.widen("GPUs", _span(spec, plan, told, total))
    elif told.elastic and not prediction.fits:
        on_more = dict(_on_more(found, told, plan))
        told.widen("GPUs", (min(on_more.values(), default=total) / total, 1.0))
        has = told.device.memory_bytes
        told.fits_on = next((count for count, needs in on_more.items() if needs <= has), 0)
    return _sized(path, text, found, told, spec, prediction)


def _bytes(model: ModelSpec, plan: ParallelPlan, told: Told, **changed: Any) -> float | None:
    """Return the memory of a plan with some fields changed; None where it cannot be."""
    try:
        plan = dataclasses.replace(plan, **changed)
        found = evaluate_plan(model, told.device, told.cluster.fabric, plan=plan)
    except FivefoldError:
        return None
    return found.memory.total_bytes


def _on_more(found: Found, told: Told, plan: ParallelPlan) -> Iterator[tuple[int, float]]:
    """Yield larger numbers of GPUs than the fewest that a recipe needs, and its memory on them."""
    for count in (plan.num_gpus << power for power in range(1, 11)):
        cluster = dataclasses.replace(told.cluster, num_gpus=count)
        more = Told(found.reader, found.settings, path=told.path, cluster=cluster, model=told.model)
        try:
            model, other = _READERS[found.reader](more)
            cluster.require(other.num_gpus)
        except FivefoldError:  # a batch that is no multiple, or more than there are
            continue
        if other.num_gpus == count and (needs := _bytes(model, other, more)):
            yield count, needs


def _span(
    model: ModelSpec, plan: ParallelPlan, told: Told, total_bytes: float
) -> tuple[float, float]:
    """Return the least and most memory with other numbers of replicas, as shares."""
    found: list[float] = [total_bytes]
    for data in [*(1 << power for power in range(plan.data.bit_length())), 64 * plan.data]:
        whole = plan.micro_batch * data * plan.num_micro_batches
        changed = {"data": data, "global_batch": whole, "shard": None}
        found.append(_bytes(model, plan, told, **changed) or total_bytes)
    return min(found) / total_bytes, max(found) / total_bytes


def _refuses(error: FivefoldError, found: Found) -> bool:
    """Return whether an error is the program's own: what only we cannot price is unknown."""
    return isinstance(error, RefusedError) or bool(found.table)


def _failed(
    path: Path, text: str, found: Found, told: Told, error: FivefoldError, *, refused: bool
) -> RecipeVerdict:
    return RecipeVerdict(
        path=path,
        program=found.program,
        status="invalid" if refused else "unknown",
        message=error.message,
        hint=error.hint or "",
        line=_line_of(text, error.message),
        reading=told.account(broken_off=True),
    )


def _sized(
    path: Path, text: str, found: Found, told: Told, model: ModelSpec, prediction: PlanPrediction
) -> RecipeVerdict:
    """Return the verdict on a recipe that was priced, by its memory."""
    needs, has = prediction.memory.total_bytes, told.device.memory_bytes
    reading, turned = told.verdict_account(prediction.memory, has)
    message = f"needs {format_bytes(needs)} of {format_bytes(has)} a GPU"
    verdict = RecipeVerdict(
        path=path, program=found.program, status="ok", message=message, reading=reading,
        prediction=prediction, model=model,
    )  # fmt: skip
    if turned:
        names = ", ".join(note.name for note in reading.decisive()[:4])
        return dataclasses.replace(
            verdict, status="unknown", message=f"{message}; {names} could turn that over",
            hint=_advice(reading, told.fits_on), line=_line_of(text, names),
        )  # fmt: skip
    if needs <= has:
        return verdict
    return dataclasses.replace(
        verdict,
        status="memory",
        message=f"does not fit: {message}",
        hint="smaller micro-batches, recomputation, sharding or more pipeline stages; fivefold "
        "plan searches for one that fits",
        line=_line_of(text, "micro_batch"),
    )


def _advice(reading: Reading, fits_on: int) -> str:
    """Return what to add to a recipe, or take from it, for a verdict."""
    said = []
    for note in [note for note in reading.assumed if note.decisive][:4]:
        branch = note.name.removeprefix("branch with ")
        own = _ADVICE.get(note.name, f"say {note.name}")
        if note.name == "GPUs" and fits_on:
            own = f"{own}; it fits on {fits_on}"
        said.append(own if branch == note.name else f"give {branch} outside of a branch")
    left = [note.name for note in reading.left_out if note.decisive]
    if left:
        more = "" if len(left) <= _NAMED else f" and {len(left) - _NAMED} more"
        said.append(f"check a copy without {', '.join(left[:_NAMED])}{more}")
    return "; ".join(said)


_NAMED = 4  # of those left out
_ADVICE = {
    "GPUs": "say how many GPUs, as in --cluster h100-nemo:64",
    "vocabulary": "say vocab_size",
    "sequence length": "say how many tokens samples have at most",
    "products": "say bf16 or fp16",
    "tower": "a recipe of the text alone has a verdict",
    "micro-batch": "check it without packing, with samples of full length",
    "plan": "give the job a [plan]",
}  # fmt: skip


def _fivefold(told: Told, found: Found) -> tuple[ModelSpec, ParallelPlan]:
    where, cluster = str(told.path), told.cluster
    job = job_from_table(found.table, where=where, folder=told.path.parent, cluster=cluster)
    for name in found.settings:
        told.get(name)
    if job.plan is not None:
        return job.model, job.plan
    told.assume("plan", "the fastest of its space", "the job has no [plan]")
    best = search_plans(job.model, cluster.device, cluster.fabric, space=job.space, top=1).best
    return job.model, best[0].plan


_READERS: Mapping[str, Callable[[Told], tuple[ModelSpec, ParallelPlan]]] = {
    "megatron": read_megatron, "torchtitan": read_torchtitan, "automodel": read_automodel,
    "nemo-rl": read_automodel, "nemo": read_automodel,
}  # fmt: skip


_KEYS = {
    "tensor": ("tensor",), "pipeline": ("pipeline",), "context": ("context",),
    "expert": ("expert", "ep_size"), "micro_batch": ("micro", "local_batch", "batch"),
    "global_batch": ("global",), "sequence": ("sequence",), "virtual": ("virtual",),
    "heads": ("heads",), "GPUs": ("nproc", "devices", "gpus", "GPUS"), "model": ("model", "flavor"),
}  # fmt: skip


def _line_of(text: str, message: str) -> int:
    """Return the line of a file that a message is about, as well as words tell; else 1."""
    lines = text.splitlines()
    for said in _said(message):
        for number, line in enumerate(lines, start=1):
            plain = line.replace("-", "_")
            if said in plain and not plain.lstrip().startswith("#"):
                return number
    return 1


def _said(message: str) -> Iterable[str]:
    found = sorted((message.find(word), word) for word in _KEYS if word in message)
    yield from (word.partition("=")[0] for word in message.replace(",", " ").split() if "_" in word)
    for _, word in found:
        yield from _KEYS[word]
