"""The settings of one recipe, and the account of what became of each."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, FivefoldError, require_whole
from fivefold.reading import Reading
from fivefold.strategy._memory import MemoryUse
from fivefold.strategy.cluster import Cluster
from fivefold.strategy.model import ModelSpec

SAME = (1.0, 1.0)
ANY = (0.0, math.inf)
# What only the launch decides: $NAME, {{name}}, {computed}, <name>, `command`, ???
_AT_LAUNCH = re.compile(r"\$|`|\?\?\?|\{\{.*\}\}|^\{.*\}$|<[^<>]*>")
_SWITCHED_OFF = (0.7, 1.4)
# Of a switch with such a word off means nothing, or the time alone.
_NEGATION = re.compile(
    r"(^|.*[._])(no|not|disable|deprecated|legacy|num|layers|overlap|fp32|compress|foreach)([._]|$)"
)
_EMPTY = {"", "null", "~", "{}", "[]"}
_UNSET = {"", "none", "null", "~"}
_OFF = {"false", "0", "no", "off"}
_ON = {"true", "1", "yes", "on"}
_NOT_KNOWN = "not known here"
_MOST_GPUS = 1 << 17


class UnknownError(FivefoldError):
    """A recipe says too little to be judged, or something that has no price."""


class RefusedError(ConfigurationError):
    """A recipe breaks a rule of the program that it is for."""


@dataclass(frozen=True)
class Setting:
    """One setting: its name as the recipe writes it, and its value.

    ``conditional`` is of a setting that stands in a branch of a script, ``inherited`` of one that a
    file below the recipe says, ``defaulted`` of one that the environment may give another value.
    """

    written: str
    value: Any
    conditional: bool = False
    inherited: bool = False
    defaulted: bool = False

    @property
    def given(self) -> bool:
        """Return whether it has a value at all."""
        return self.value is not None and str(self.value).strip().lower() not in _EMPTY


@dataclass
class _Effect:
    """Something assumed or left out, and by what share it could change the memory.

    ``part`` is "activations" of what changes what is kept between forward and backward alone;
    ``added`` are bytes that may lie beside all of it.
    """

    kind: str
    name: str
    why: str
    value: Any
    memory: tuple[float, float]
    part: str = ""
    added: float = 0.0


class Told:
    """What a recipe says, and what was assumed where it says nothing.

    Args:
        program: Whose lists of flags hold.
        settings: By the name that the program's reader knows them by.
        path: The file.
        cluster: Where it is to run.
        model: The model that somebody gave beside the recipe.
        model_reading: The account of its file.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Setting],
        *,
        path: Path,
        cluster: Cluster,
        model: ModelSpec | None = None,
        model_reading: Reading | None = None,
    ) -> None:
        self.program, self.settings, self.path = program, settings, path
        self.cluster, self.model, self.device = cluster, model, cluster.device
        self.model_reading = model_reading
        self.elastic = ""  # whether the number of GPUs may be "another", or "more"
        self.fits_on = 0  # GPUs, where it does not fit on as many as are assumed
        self.spans: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._read: dict[str, str] = {}
        self._effects: list[_Effect] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of some settings that has one."""
        found = [(name, self.settings[name]) for name in names if name in self.settings]
        given = [(name, setting) for name, setting in found if setting.given]
        if not given:
            return default
        value = given[0][1].value
        if isinstance(value, str) and _AT_LAUNCH.search(value):
            message = f"{given[0][0]} is {value!r}, which only the launch decides"
            raise UnknownError(message, hint="give it a value in the file")
        if isinstance(value, str) and value != value.strip():
            why = "the value has blanks around it, which its program may not drop"
            self.assume(f"blanks of {given[0][1].written}", "none", why)
            value = value.strip()
        self._take(given[0][1])
        for name, setting in given[1:]:
            if setting.written not in self._read:
                self.unpriced(name, f"{given[0][1].written} says the same and goes first")
        return value

    def gives(self, name: str) -> bool:
        """Return whether a setting is there and has a value."""
        return name in self.settings and self.settings[name].given

    def is_true(self, name: str) -> bool:
        """Return whether a switch is on; its place in the account stays open."""
        if not self.gives(name):
            return False
        word = str(self.settings[name].value).strip().lower()
        return self.on(name) if word not in _ON | _OFF else word in _ON

    def _take(self, setting: Setting) -> None:
        self._read.setdefault(setting.written, "")
        if setting.conditional:
            why = "it stands in a branch of the script, and may not be given"
            self.assume(f"branch with {setting.written}", "taken", why, memory=ANY)

    def text(self, *names: str, default: str = "") -> str:
        """Return a setting as lower letters."""
        return str(self.get(*names, default=default)).strip().lower()

    def word(self, *names: str, among: Iterable[str], default: str = "") -> str:
        """Return a setting that is one of some words, without ``torch.``; empty where not set.

        Another word may mean anything: nothing is judged beside it.
        """
        found = self.text(*names, default=default).removeprefix("torch.")
        if found in _UNSET:
            return ""
        if found not in among:
            said = next(self.settings[name] for name in names if self.gives(name))
            message = f"{said.written} is {str(said.value)!r}, which is not read"
            raise UnknownError(message, hint=f"known are {', '.join(sorted(among))}")
        return found

    def whole(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the first of some settings that is given, a whole number of at least ``least``."""
        for name in names:
            if (value := self.get(name)) is None or str(value).lower() == "none":
                continue
            try:
                number = float(str(value).replace("_", "").replace(",", ""))
                if number.is_integer() and number >= least:
                    return int(number)
            except ValueError:
                pass
            message = f"{name} must be a whole number; got {value!r}"
            raise RefusedError(message, hint=f"such as 8; none below {least}")
        if default is None:
            message = f"the recipe does not say {names[0]}"
            raise UnknownError(message, hint=f"add {names[0]}, or check it with its base")
        return default

    def share(self, *names: str, default: float) -> float:
        """Return a setting that is a number from 0 to 1."""
        value = self.get(*names, default=default)
        if str(value).strip().lower() in _UNSET:
            return default
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= 1:
            message = f"{names[0]} must be a number from 0 to 1; got {value!r}"
            raise RefusedError(message, hint="such as 0.1")
        return number

    def on(self, *names: str) -> bool:
        """Return whether one of some switches is on."""
        found = [self.word(name, among=_ON | _OFF) for name in names]  # all are read
        return any(word in _ON for word in found)

    def off(self, name: str) -> bool:
        """Return whether a switch is said to be off."""
        return self.word(name, among=_ON | _OFF) in _OFF

    def degree(self, axis: str, *names: str) -> int:
        """Return one degree of the model's split; one that is not said is 1."""
        found = self.whole(*names, default=1)
        said = next((self.settings[name] for name in names if self.gives(name)), None)
        if said is not None and said.defaulted:
            why = "a default, which the launch may change with the number of GPUs"
            self.assume(f"default of {said.written}", found, why, memory=(0.0, 1.0))
        try:
            return require_whole(f"the {axis} parallel degree", found, hint="1 leaves it whole")
        except ConfigurationError as error:
            raise RefusedError(error.message, hint=error.hint) from None

    def assume(
        self,
        name: str,
        value: Any,
        why: str,
        *,
        memory: tuple[float, float] = SAME,
        added: float = 0.0,
    ) -> None:
        """Note a value that the recipe does not say, and how another could change the memory."""
        if all(effect.name != name for effect in self._effects):
            effect = _Effect("assumed", name, why, value, memory, added=added)
            self._effects.append(effect)

    def assume_model(
        self, name: str, value: Any, why: str, *, least: Mapping[str, Any], most: Mapping[str, Any]
    ) -> None:
        """Note a part of the model that the recipe does not say, and how far off it could be.

        Args:
            name: For people.
            value: What was taken.
            why: For what reason.
            least: Fields of the model where it is as small as it could be.
            most: Fields where it is as large.
        """
        self.assume(name, value, why)
        self.spans[name] = (least, most)

    def adopt(self, reading: Reading | None, *, of: str) -> None:
        """Take over what was assumed and left out of the model's own file."""
        if reading is None:
            return
        for kind, notes in (("assumed", reading.assumed), ("left out", reading.left_out)):
            for note in notes:
                memory, name = ANY if note.decisive else SAME, f"{note.name} of {of}"
                self._effects.append(_Effect(kind, name, note.why, note.value, memory))

    def widen(self, name: str, memory: tuple[float, float]) -> None:
        """Say by what share something assumed could change the memory."""
        for effect in self._effects:
            if effect.name == name:
                effect.memory = memory

    def describe(self, name: str, why: str) -> None:
        """Say what became of a setting."""
        if (setting := self.settings.get(name)) is not None:
            self._read[setting.written] = why

    def unpriced(self, name: str, why: str, *, memory: tuple[float, float] = SAME) -> None:
        """Leave out a setting that was looked at and has no price."""
        setting = self.settings[name]
        self._read.pop(setting.written, None)
        if all(effect.name != setting.written for effect in self._effects):
            self._effects.append(_Effect("left out", setting.written, why, None, memory))

    def idle(self, why: str, *names: str) -> None:
        """Note settings that have no effect beside the others."""
        for name in names:
            setting = self.settings.get(name)
            if setting is not None and setting.given and setting.written not in self._read:
                self._effects.append(_Effect("harmless", setting.written, why, None, SAME))

    def refuse_unless(self, holds: bool, message: str, hint: str) -> None:  # noqa: FBT001 - a rule
        """Raise where a rule of the program is broken."""
        if not holds and "launch.patched" in self.settings:
            message = f"{message}, by the rules of Megatron-LM, which it changes"
            raise UnknownError(message, hint=hint)
        if not holds:
            raise RefusedError(message, hint=hint)

    def gpus_said(self) -> int:
        """Return the GPUs that launcher, scheduler or variables name; 0 where none does."""
        each, nodes = self.gpus_of_node(), self.whole("launch.nnodes", default=0)
        if each and nodes:
            return each * nodes
        whole = self.whole("launch.world_size", "launch.total_gpus", default=0)
        tasks = self.whole("launch.ntasks", default=0)
        if not whole and tasks:  # a task starts processes of its own, or is one
            whole = tasks * (each or self.whole("launch.gpus_per_task", default=1))
        return whole or each * max(nodes, 1)

    def gpus_of_node(self) -> int:
        """Return the processes of a node; 0 where nothing says so."""
        word = self.text("launch.nproc_per_node")
        if word in {"auto", "gpu"}:
            each = self.cluster.fabric.gpus_per_host
            self.assume("GPUs of a node", each, f"nproc-per-node is {word}: as the cluster has")
            return each
        if word == "cpu":
            message = "nproc-per-node is cpu: as many processes as a node has CPUs"
            raise UnknownError(message, hint="give it the number of GPUs of a node")
        return self.whole("launch.nproc_per_node", "launch.gpus_per_node", default=0)

    def gpus(self, said: int, split: int, allows: Callable[[int], bool]) -> int:
        """Return the GPUs: as said, as the cluster has, or as few as the program allows.

        Args:
            said: GPUs that the recipe names; 0 where it names none.
            split: GPUs of one replica, which must divide them.
            allows: Whether the program's other rules hold for a number of GPUs.
        """
        default = self.settings.get("launch.default")
        if said and default is not None:
            self.assume("GPUs", said, f"the default of {default.written}, which the launch decides")
            self.elastic = "another"
            if said % split or not allows(said):
                message = f"{said} GPUs, the default of {default.written}, do not suit its degrees"
                raise UnknownError(message, hint=f"give {default.written} the value it runs with")
        if said:
            self.refuse_unless(
                said % split == 0,
                f"{said} GPUs are not a multiple of tensor x pipeline x context = {split}",
                "data parallelism takes what is left: degrees must divide the GPUs",
            )
            return said
        if self.cluster.num_gpus:
            self.assume("GPUs", self.cluster.num_gpus, "as many as the cluster has")
            if self.cluster.num_gpus % split == 0:
                return self.cluster.num_gpus
            message = f"the cluster's {self.cluster.num_gpus} GPUs are not a multiple of {split}"
            hint = "the recipe does not say how many GPUs: give a cluster of as many as it needs"
            raise UnknownError(message, hint=hint)
        node = self.cluster.fabric.gpus_per_host
        least = math.lcm(split, node) if split > node else split * max(1, node // split)
        counts = range(least, _MOST_GPUS, least)
        found = next((count for count in counts if allows(count)), None)
        if found is None:
            message = "the recipe does not say how many GPUs, and no number of nodes suits it"
            raise UnknownError(message, hint="name them, as in --cluster h100-nemo:16")
        why = "the recipe does not say; the fewest nodes that its degrees and batch allow"
        self.assume("GPUs", found, why)
        self.elastic = "more"
        return found

    def account(self, *, broken_off: bool = False) -> Reading:
        """Return what became of every setting; each stands in exactly one list.

        Args:
            broken_off: The verdict was clear before all of it was read.
        """
        reading = Reading(str(self.path))
        for written, why in self._read.items():
            reading.take(written, why)
        self._sort_rest(broken_off=broken_off)
        for effect in self._effects:
            if effect.name in reading.names():
                continue
            if effect.kind == "assumed":
                reading.assume(effect.name, effect.value, effect.why)
            elif effect.kind == "left out":
                reading.leave_out(effect.name, effect.why)
            else:
                reading.ignore(effect.name, effect.why)
        return reading

    def verdict_account(self, memory: MemoryUse, memory_bytes: float) -> tuple[Reading, bool]:
        """Return the account, and whether what was assumed or left out could turn the verdict."""
        reading = self.account()
        # Flags of one kind change the memory once, however many there are of it.
        shares = {(effect.why, effect.memory, effect.part) for effect in self._effects}
        kept = memory.activations_bytes + memory.working_bytes
        ends = []
        for side in (0, 1):
            whole = math.prod(share[side] for _, share, part in shares if not part)
            some = math.prod(share[side] for _, share, part in shares if part)
            ends.append(whole * (memory.total_bytes - kept + kept * some))
        ends[1] += sum({effect.why: effect.added for effect in self._effects}.values())
        fits = memory.total_bytes <= memory_bytes
        turned = ends[1] > memory_bytes if fits else ends[0] <= memory_bytes
        if not turned:
            return reading, False
        side = 1 if fits else 0
        names = {
            effect.name
            for effect in self._effects
            if effect.memory[side] != 1.0 or (side and effect.added)
        }
        for notes in (reading.assumed, reading.left_out):
            notes[:] = [
                type(note)(note.name, note.why, note.value, decisive=True)
                if note.name in names
                else note
                for note in notes
            ]
        return reading, True

    def _sort_rest(self, *, broken_off: bool) -> None:
        """Give every setting that nothing read its place."""
        placed = set(self._read) | {effect.name for effect in self._effects}
        for name, setting in self.settings.items():
            if setting.written not in placed and not setting.inherited:
                placed.add(setting.written)
                fate = self._fate(name, setting)
                if broken_off and fate.why.startswith(_NOT_KNOWN):
                    fate = _Effect("left out", setting.written, "not reached", None, SAME)
                self._effects.append(fate)

    def _fate(self, name: str, setting: Setting) -> _Effect:
        kind, why, memory, part, added = "left out", _NOT_KNOWN, ANY, "", 0.0
        if not setting.given:
            return _Effect("harmless", setting.written, "not set", None, SAME)
        value = str(setting.value).strip().lower()
        off = value in _OFF
        supposed = _flag_table().get(self.program, {}).get("supposed", {})
        if value in supposed.get(name.lower(), ()):
            return _Effect("harmless", setting.written, "as the reader supposes", None, SAME)
        for rule in _rules(self.program):
            if rule.pattern.fullmatch(name.lower()):
                kind, why, memory = rule.kind, rule.why, rule.memory
                part, added = rule.part, rule.added
                if off and rule.off_changes and not _NEGATION.match(name):
                    why = "it is off, where the reader supposes it on"
                    if kind == "harmless":
                        memory, part = _SWITCHED_OFF, "activations"
                    return _Effect("left out", setting.written, why, None, memory, part)
                if kind == "left out" and off:
                    return _Effect("harmless", setting.written, "switched off", None, SAME)
                break
        else:
            if off:
                return _Effect("left out", setting.written, f"{why}; it is off", None, SAME)
        return _Effect(kind, setting.written, why, None, memory, part, added)


@dataclass(frozen=True)
class _Rule:
    kind: str
    pattern: re.Pattern[str]
    why: str
    memory: tuple[float, float]
    part: str
    added: float
    off_changes: bool


def is_switch(name: str) -> bool:
    """Return whether a flag of Megatron-LM takes no value."""
    return name in _flag_table()["megatron"]["switches"] or _SWITCH.match(name) is not None


_SWITCH = re.compile(r"(no|use|disable|enable|overlap|untie|apply)_(?!checkpoint_path)")


@functools.cache
def _flag_table() -> dict[str, Any]:
    text = (files("fivefold.strategy._recipes") / "flags.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


# Programs that take settings of others.
_SPEAKS = {
    "nemo": ("megatron", "automodel"), "primus": ("megatron", "automodel"),
    "bridge": ("megatron", "automodel"), "nemo-rl": ("nemo-rl", "automodel", "megatron"),
}  # fmt: skip


@functools.cache
def _rules(program: str) -> tuple[_Rule, ...]:
    """Return the fates of flags that no reader reads, of a program and of all."""
    table = _flag_table()
    found = []
    parts = _SPEAKS.get(program, (program,))
    for kind, part in itertools.product(("harmless", "left_out"), (*parts, "all")):
        for rule in table.get(part, {}).get(kind, ()):
            pattern = re.compile("|".join(fnmatch.translate(name) for name in rule["names"]))
            low, high = rule.get("memory", SAME)
            off_changes = rule.get("off_changes", False)
            found.append(
                _Rule(
                    kind.replace("_", " "),
                    pattern,
                    rule["why"],
                    (low, high),
                    rule.get("of", ""),
                    rule.get("added", 0.0),
                    off_changes,
                )
            )
    return tuple(found)
