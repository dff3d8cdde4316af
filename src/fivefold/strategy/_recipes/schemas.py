"""Whose recipe a file is, told by its schema, and its settings under the names of its reader."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fivefold.errors import DataError, FivefoldError
from fivefold.files import parse_toml, parse_yaml, read_text
from fivefold.strategy._recipes.registries import function_settings, registry_functions
from fivefold.strategy._recipes.texts import (
    Script,
    flags_and_rest,
    flags_of,
    leaves,
    python_settings,
    read_script,
)
from fivefold.strategy._recipes.told import Setting, is_switch

Program = Literal[
    "fivefold", "megatron", "torchtitan", "nemo", "automodel", "primus", "bridge", "nemo-rl"
]
Settings = dict[str, Setting]
_SAYS = {"num_layers", "hidden_size", "hybrid_layer_pattern", "hybrid_override_pattern"}
_STARTERS = re.compile(
    r"(^|/)(torchrun|python[\d.]*|srun|mpirun|deepspeed|accelerate|ray|uv|bash)$"
)
_OUR_OWN, _NONE = "planned by fivefold", Setting("$@", value=None)
# Scripts that train no model, by the words of their names.
_NO_TRAINING = re.compile(
    r"inference|generat|server|convert|export|preprocess|quantize|ptq|prune|evaluat|(^|_)eval|"
    r"mmlu|merge|tasks/msdp|zeroshot|tasks/main|hf_to|to_hf|verify|validate|benchmark_infer|embed_corpus"
)
_OTHER_KIND = re.compile(r"t5|(^|_)ict|realm|vision|vlm|multimodal|retro|mimo|dino|inpaint")
_BLANK_BEHIND = re.compile(r"^[^#\n]*--[^#\n]*\\[ \t]+$", re.MULTILINE)
_LAUNCH = {
    "nproc_per_node": "nproc_per_node", "gpus_per_node": "gpus_per_node", "nnodes": "nnodes",
    "num_nodes": "nnodes", "nodes": "nnodes", "world_size": "world_size", "num_gpus": "world_size",
    "gpus": "gpus_per_node", "ntasks_per_node": "gpus_per_node", "ngpu": "ngpu",
    "ngpus_per_node": "gpus_per_node", "num_gpus_per_node": "gpus_per_node",
    "vocab_size": "vocab_size", "nproc-per-node": "nproc_per_node", "gres": "gpus_per_node",
    "ntasks": "ntasks", "gpus_per_task": "gpus_per_task", "total_gpus": "total_gpus",
}  # fmt: skip
_SLURM = {"-N": "--nodes", "-n": "--ntasks", "-G": "--total-gpus", "--gpus": "--total-gpus"}
# What launchers call the counts, where it is not what others mean by the word.
_OWN_WORDS = {
    "srun": _SLURM, "mpirun": {"-np": "--ntasks", "-n": "--ntasks", "--np": "--ntasks",
                               "--npernode": "--gpus-per-node", "-npernode": "--gpus-per-node"},
    "mpiexec": {"-np": "--ntasks", "-n": "--ntasks"},
    "accelerate": {"--num_processes": "--world-size", "--num-processes": "--world-size"},
    "deepspeed": {"--num_gpus": "--gpus-per-node", "--num_nodes": "--nodes"},
}  # fmt: skip
_MOST_FILES = 20  # that one recipe stands on


@dataclass(frozen=True)
class Found:
    """A recipe that was recognised.

    ``reader`` is the program whose words it speaks; ``trouble`` says why it cannot be judged, which
    a model given beside it mends where only ``sizes`` are missing.
    """

    program: Program
    reader: str = ""
    settings: Settings = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    no_training: str = ""
    trouble: tuple[str, str] | None = None
    sizes: bool = False


class UnreadableError(FivefoldError):
    """A file has a program's words, and is not of the form that the program reads."""

    def __init__(self, error: FivefoldError, program: Program) -> None:
        super().__init__(error.message, hint=error.hint)
        self.program = program


# Words that, at the head of a line, only recipes have.
_KEYS_OF_RECIPES = re.compile(
    r"^\s*\"?(((policy|model|distributed)\.)?(tensor_model_parallel_size|micro_batch_size|tp_size|"
    r"local_batch_size|train_micro_batch_size)|MODEL_ARGS|step_scheduler|megatron_cfg)\"?\s*:",
    re.MULTILINE,
)
_KEYS_OF_TITAN = re.compile(
    r"^\s*(\[parallelism\]|flavor\s*=|\w+_parallel_degree\s*=)", re.MULTILINE
)


def recognise(path: Path, text: str) -> Found | None:
    """Return whose recipe a file is with its settings; None where it is none.

    Raises:
        UnreadableError: It has a program's words, and cannot be parsed.
    """
    if path.suffix == ".py":
        try:
            settings = python_settings(text)
        except FivefoldError as error:
            if "config_registry" not in text:
                return None
            raise UnreadableError(error, "torchtitan") from error
        return None if settings is None else Found("torchtitan", "torchtitan", _of_module(settings))
    if path.suffix in {".sh", ".txt"}:
        return _of_script(path, text)
    if path.suffix == ".toml":
        return _of_toml(path, text)
    return _of_yaml(path, text)


def recognise_registry(path: Path, text: str) -> dict[str, tuple[int, Found]]:
    """Return the recipes of a registry of torchtitan by the names of their functions, with lines.

    Raises:
        UnreadableError: It has recipes, and is not Python.
        DataError: It is no Python otherwise.
    """
    try:
        functions = registry_functions(ast.parse(text))
    except (SyntaxError, ValueError) as error:
        wrong = DataError(f"the module is not Python: {error}", hint="mend that line")
        raise UnreadableError(wrong, "torchtitan") if "Trainer.Config" in text else wrong from error
    family = {"model.name": Setting("model.name", path.parent.name, inherited=True)}
    return {
        name: (node.lineno, Found("torchtitan", "torchtitan", {
            key: Setting(key, value) for key, value in function_settings(functions, name).items()
        } | family))
        for name, node in functions.items()
    }  # fmt: skip


def _of_module(settings: Mapping[str, Any]) -> Settings:
    found = {}
    for name, value in settings.items():
        section = "" if "." in name or name == "config_function" else "training."
        section = "parallelism." if re.search("parallel|fsdp|_pp_", name) else section
        found[section + name] = Setting(name, value)
    return found


def _of_toml(path: Path, text: str) -> Found | None:
    if not any(word in text for word in ("global_batch", "parallelism", "flavor")):
        return None
    try:
        table = parse_toml(text, where=str(path))
    except FivefoldError as error:
        if _KEYS_OF_TITAN.search(text) is None:
            return None
        raise UnreadableError(error, "torchtitan") from error
    if "global_batch" in table and "model" in table:
        settings = {name: Setting(name, value) for name, value in leaves(table).items()}
        return Found("fivefold", "fivefold", settings, table)
    named = "parallelism" in table or "flavor" in _part(table, "model")
    return Found("torchtitan", "torchtitan", _of_titan(leaves(table))) if named else None


_MOVED = {"training.batch_size": "training.local_batch_size"}  # since 2025


def _of_titan(values: Mapping[str, Any]) -> Settings:
    found = {}
    for name, value in values.items():
        section, _, leaf = name.partition(".")
        old = section in {"training", "experimental"} and re.search("parallel|fsdp_", leaf)
        known = f"parallelism.{leaf}" if old else _MOVED.get(name, name)
        if name == "float8.enable_float8_linear" and str(value).lower() == "true":
            known, value = "model.converters", ["float8"]  # noqa: PLW2901 - its older spelling
        found[known] = Setting(name, value)
    return found


# ---- shell scripts -------------------------------------------------------------------------


def _of_script(path: Path, text: str) -> Found | None:
    if "--" not in text:
        return None
    script = _with_sources(path, read_script(text))
    commands = [command for command in script.commands if _says_model(flags_of(command))]
    if path.suffix == ".txt":  # flags in a text are a recipe where something starts with them
        commands = [command for command in commands if _STARTERS.search(command[0])]
    if not commands:
        return _of_pieces(script) if path.suffix == ".sh" else None
    named = [_program_words(command) for command in commands]
    trained = [one for one in named if not _NO_TRAINING.search(one[1].lower())]
    if not trained:
        return Found("megatron", no_training=f"{named[0][1]} trains nothing")
    launch, module, words = trained[0]
    if len({tuple(one[2]) for one in trained}) > 1:
        message = f"the script starts {len(trained)} trainings"
        return Found("megatron", trouble=(message, "check a script for each"))
    settings = _launched(script, launch)
    settings |= _flags(words)
    if _OUR_OWN in text:  # whose head says what is given behind it: data, learning rate
        settings["data.appended"] = Setting(settings.pop("words.$@", _NONE).written, "$@")
    if _BLANK_BEHIND.search(text):  # the shell ends the command there
        settings["words.\\ "] = Setting("a blank behind a backslash", "\\ ")
    settings["launch.module"] = Setting("program", module.rpartition("/")[2], inherited=True)
    if _OTHER_KIND.search(module.lower()):
        message = f"{module} trains a model of another kind than a language model's decoder"
        return Found("megatron", "megatron", settings, trouble=(message, "such have no price"))
    return Found("megatron", "megatron", settings)


def _flags(words: list[str]) -> Settings:
    """Return the flags of a program's words, and each word that belongs to none."""
    flags, rest = flags_and_rest(words, is_switch)
    found = {f"words.{word}": Setting(word, word) for word in rest}
    for flag, value in flags.items():
        name, branch = flag[2:].lstrip("?"), flag.startswith("--?")
        other = flags.get(f"--{name}" if branch else f"--?{name}", value)
        decided = value if other == value else f"$(a branch: {value} or {other})"
        known = name.replace("-", "_") if "_" not in name else f"words.--{name}"  # none has one
        found[known] = Setting(f"--{name}", decided, branch and other == value)
    return found


def _says_model(flags: Mapping[str, Any]) -> bool:
    names = {name[2:].lstrip("?").replace("-", "_") for name in flags}
    return bool(names & _SAYS) or {"micro_batch_size", "use_checkpoint_args"} <= names


def _of_pieces(script: Script) -> Found | None:
    """Return what a script that starts nothing says: flags that another one uses."""
    words = [word for value in script.variables.values() if "--" in value for word in value.split()]
    flags = flags_of(words)
    if not _says_model(flags):
        return None
    settings = _flags(words)
    message = "it starts no program that is seen here: flags stand in variables that another uses"
    return Found("megatron", "megatron", settings, trouble=(message, "check what starts with them"))


def _program_words(command: list[str]) -> tuple[list[str], str, list[str]]:
    """Split a command into its launcher's words, the program, and the program's words."""
    for place, word in enumerate(command):
        module = place and command[place - 1] == "-m" and not word.startswith("torch.dist")
        if word.endswith(".py") or module:
            return command[:place], word, command[place + 1 :]
    start = next((i for i, word in enumerate(command) if word.startswith("--")), 0)
    return [], " ".join(command[:start]), command[start:]


def _launched(script: Script, launch: list[str]) -> Settings:
    """Return what is said of GPUs: by the launcher, by Slurm, by variables of usual names."""
    found: Settings = {}
    slurm = _long_words(script.slurm, _SLURM)
    for prefix, words in (("#SBATCH ", slurm), ("", _long_words(launch, {}))):
        flags = flags_of(words)
        for flag, value in flags.items():
            name = flag[2:].lstrip("?").replace("-", "_").lower()
            known = _LAUNCH.get(name)
            plain = str(value).split(maxsplit=1)[0]  # a program may follow
            if known == "nnodes" and re.fullmatch(r"\d+:\d+", plain):  # as many as come
                found["launch.default"] = Setting(flag, plain, inherited=True)
            place = f"launcher.{name}" if known is None else f"launch.{known}"
            count = value if known is None else plain.rpartition(":")[2]  # of gpu:8, or 1:4
            found[place] = Setting(f"{prefix}{flag}", count)
    for name, value in script.variables.items():
        known = _LAUNCH.get(name.lower())
        if known is not None and f"launch.{known}" not in found and re.search(r"\d", value):
            found[f"launch.{known}"] = Setting(name, value)
    asked = [
        name
        for name in script.variables.defaulted
        if re.search(r"NODE|GPU|WORLD|NPROC", name) and "RANK" not in name
    ]
    if asked:
        found["launch.default"] = Setting(asked[0], "its default", inherited=True)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        if name in script.variables:
            found[f"env.{name.lower()}"] = Setting(name, script.variables[name])
    for name in script.sources:
        found[f"source.{name}"] = Setting(f"source {name}", value="a file")
    return found


def _long_words(words: list[str], own: Mapping[str, str]) -> list[str]:
    """Return a launcher's words with counts under their usual names."""
    found: list[str] = []
    for word in words:
        own = _OWN_WORDS.get(word.rpartition("/")[2], own)
        name, sign, value = word.partition("=")
        if (short := re.fullmatch(r"(-[NnG])(\d+)", word)) is not None and short[1] in own:
            found += [own[short[1]], short[2]]
        else:
            found.append(f"{own.get(name, name)}{sign}{value}")
    return found


def _with_sources(path: Path, script: Script) -> Script:
    """Read what a script sources, where it lies beside it."""
    for name in list(script.sources):
        # A folder that only the shell knows is the script's own where the file is there.
        plain = re.sub(r"^(\$\{?\w+\}?|\$\(.*\))/", "", name.strip().strip("\"'"))
        beside = path.parent / plain
        if "$" not in plain and beside.is_file():
            script.sources.remove(name)
            line = rf"^\s*(source|\.)\s.*{re.escape(plain)}.*$"
            body = re.sub(line, "", read_text(path), flags=re.MULTILINE)
            return read_script(f"{read_text(beside)}\n{body}")
    return script


# ---- YAML ----------------------------------------------------------------------------------


def _of_yaml(path: Path, text: str) -> Found | None:
    words = ("parallel", "tp_size", "micro_batch_size", "local_batch_size", "MODEL_ARGS",
             "defaults", "framework", "step_scheduler", "policy")  # fmt: skip
    # A template of Helm or Jinja is no YAML yet; several documents are Kubernetes's.
    template = "{{" in text or re.search(r"^apiVersion:", text, re.MULTILINE) is not None
    if path.parent.name == "workflows" or template or not any(word in text for word in words):
        return None
    text = re.sub(r"\{%.*?%\}", "", text)
    twice: list[str] = []
    try:
        table = parse_yaml(text, where=str(path), twice=twice)
    except FivefoldError as error:
        if _KEYS_OF_RECIPES.search(text) is None:
            return None
        raise UnreadableError(error, "nemo") from error
    if not isinstance(table, dict):
        return None
    for known in (_titan_yaml, _megatron_test, _primus, _nemo_rl, _nemo_launcher, _automodel,
                  _megatron_yaml, _bridge):  # fmt: skip
        found = known(path, table)
        if found is not None:
            return _with_twice(path, found, twice)
    return None


def _with_twice(path: Path, found: Found, twice: list[str]) -> Found:
    """Note keys that a file has twice: PyYAML takes the last one, OmegaConf refuses the file."""
    if twice and found.program not in {"megatron", "primus", "automodel"}:
        error = DataError(f"{path} has the key {twice[0]!r} twice", hint="keep one of the two")
        raise UnreadableError(error, found.program)
    noted = {f"twice.{key}": Setting(f"{key} a second time", "the last") for key in twice}
    return dataclasses.replace(found, settings=noted | found.settings)


def _part(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _named(values: Mapping[str, Any], prefixes: Mapping[str, str]) -> Settings:
    """Return settings under the names of a reader, which leave out or change a section's."""
    found: Settings = {}
    for name, value in values.items():
        known = name
        for old, new in prefixes.items():
            if name.startswith(old) and (old.endswith(".") or name == old):
                known = new + name[len(old) :]
                break
        if known not in found or not found[known].given:
            found[known] = Setting(name, value)
    return found


def _megatron_test(_path: Path, table: Mapping[str, Any]) -> Found | None:
    arguments = _part(table, "MODEL_ARGS")
    if not any(name.startswith("--") for name in arguments):
        return None
    flags = {name[2:].replace("-", "_"): Setting(name, value) for name, value in arguments.items()}
    if str(table.get("MODE", "pretraining")) in {"inference", "server"} or (
        "micro_batch_size" not in flags and set(flags) & {"num_tokens_to_generate", "prompts"}
    ):
        return Found("megatron", no_training="it generates text and trains nothing")
    settings = {"launch.yaml": Setting("MODEL_ARGS", value=True, inherited=True)}
    for name, value in leaves({k: v for k, v in table.items() if k != "MODEL_ARGS"}).items():
        known = _LAUNCH.get(name.lower())
        lower = name.lower().replace("env_vars.", "env.")
        settings[f"launch.{known}" if known else f"test.{lower}"] = Setting(name, value)
    return Found("megatron", "megatron", settings | flags)


def _megatron_yaml(_path: Path, table: Mapping[str, Any]) -> Found | None:
    if not {"language_model", "model_parallel"} <= set(table):
        return None
    values = leaves(table)
    prefixes = {f"{section}.": "" for section in ("language_model", "model_parallel")}
    settings = _named(values, prefixes) | {
        "launch.yaml": Setting("language_model", value=True, inherited=True)
    }
    return Found("megatron", "megatron", settings)


def _titan_yaml(_path: Path, table: Mapping[str, Any]) -> Found | None:
    """Return the settings of a program that takes torchtitan's sections as YAML."""
    if "parallelism" not in table or "flavor" not in _part(table, "model"):
        return None
    counts = {"processes.procs": "launch.nproc_per_node", "processes.hosts": "launch.nnodes"}
    return Found("torchtitan", "torchtitan", {
        counts.get(name, name): one for name, one in _of_titan(leaves(table)).items()
    })  # fmt: skip


def _primus(path: Path, table: Mapping[str, Any]) -> Found | None:
    modules = _part(table, "modules")
    module = next((one for one in modules.values() if isinstance(one, dict) and "framework" in one),
                  None)  # fmt: skip
    if module is None:
        return None
    framework, name = str(module["framework"]), str(_defaulted(module.get("model", "")))
    own = {key: _defaulted(value) for key, value in leaves(table).items()}
    if framework not in {"megatron", "torchtitan"}:
        settings = _named(own, {})
        message = f"framework {framework} has no reader here"
        return Found("primus", "primus", settings, trouble=(message, "megatron, torchtitan have"))
    inherited: dict[str, Any] = {}
    for folder, file in (("modules", str(module.get("config", ""))), ("models", name)):
        tail = Path("primus", "configs", folder, framework, str(_defaulted(file)))
        base = next((up / tail for up in path.resolve().parents if (up / tail).is_file()), None)
        if base is None and folder == "models":
            settings = _named(own, {})
            message = f"the model stands in {tail}, which is not here"
            hint = "check it in its tree"
            return Found("primus", "primus", settings, trouble=(message, hint))
        if base is not None:
            found, _ = _inherited(base, "extends", "bases", "includes")
            inherited |= found
    above = next(key for key, one in modules.items() if one is module)
    settings = {
        key: Setting(key, _defaulted(value), inherited=True) for key, value in inherited.items()
    }
    prefix = f"modules.{above}.overrides."
    asked = {key for key, value in leaves(table).items() if "${" in str(value)}
    settings |= {
        known: dataclasses.replace(one, defaulted=one.written in asked)
        for known, one in _named(own, {f"{prefix}lora.": "peft.", prefix: ""}).items()
    }
    if framework == "torchtitan":
        titan = _of_titan({key: one.value for key, one in settings.items()})
        merged = {
            key: dataclasses.replace(settings[one.written], value=one.value)
            for key, one in titan.items()
        }
        return Found("primus", "torchtitan", merged)
    here = Setting("framework", value=True, inherited=True)
    settings |= {"launch.yaml": here, "launch.patched": here}
    if re.search(r"diffusion|flux|wan", f"{name} {module.get('trainer_class', '')}".lower()):
        trouble = ("it trains a diffusion model", "such have no price")
        return Found("primus", "megatron", settings, trouble=trouble)
    return Found("primus", "megatron", settings)


def _defaulted(value: Any) -> Any:
    """Return the default of a value that the environment may change, ``${NAME:default}``."""
    if not isinstance(value, str) or "${" not in value:
        return value
    text = re.sub(r"\$\{\w+:-?([^{}]*)\}", lambda m: m[1].strip("\"'"), value)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def _inherited(path: Path, *keys: str) -> tuple[dict[str, Any], list[str]]:
    """Return the leaves of a file and of those that it extends, and names that are not there."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for one in reversed(list(_chain(path, keys, missing, set()))):
        found |= leaves({key: value for key, value in one.items() if key not in keys})
    return found, missing


def _chain(
    path: Path, keys: tuple[str, ...], missing: list[str], seen: set[Path]
) -> Iterator[dict[str, Any]]:
    if path in seen or len(seen) > _MOST_FILES:
        return
    seen.add(path)
    if not path.is_file():
        missing.append(str(path))
        return
    table = parse_yaml(read_text(path), where=str(path))
    if not isinstance(table, dict):
        return
    yield table
    for key in keys:
        bases = table.get(key)
        bases = [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []
        for base in reversed(bases):
            if isinstance(base, str) and base != "_self_":
                yield from _chain((path.parent / base).resolve(), keys, missing, seen)


def _nemo_rl(path: Path, table: Mapping[str, Any]) -> Found | None:
    algorithms = ("grpo", "sft", "dpo", "rm", "ppo", "distillation", "mopd")
    try:
        values, missing = _inherited(path.resolve(), "defaults")
    except FivefoldError:
        return None
    sections = {name.partition(".")[0] for name in values}
    if "policy" not in sections or not ({"cluster", *algorithms} & sections):
        return None
    own = set(leaves(table))
    if missing:
        settings = {name: Setting(name, values[name]) for name in own if name in values}
        message = f"it stands on {Path(missing[0]).name}, which is not here"
        return Found("nemo-rl", "nemo-rl", settings, trouble=(message, "check it in its tree"))
    megatron = str(values.get("policy.megatron_cfg.enabled", False)).lower() == "true"
    backend, other = (
        ("megatron_cfg", "dtensor_cfg") if megatron else ("dtensor_cfg", "megatron_cfg")
    )
    prefixes = {
        f"policy.{backend}.lora_cfg.": "peft.", f"policy.{backend}.peft.": "peft.",
        f"policy.{backend}.automodel_kwargs.": "", f"policy.{backend}.": "",
        f"policy.{other}.": "unused.", "policy.": "",
        "cluster.gpus_per_node": "launch.gpus_per_node", "cluster.num_nodes": "launch.nnodes",
    }  # fmt: skip
    settings = {
        known: Setting(
            one.written,
            _within(one.value, values, f"{one.written.rpartition('.')[0]}."),
            inherited=one.written not in own,
        )
        for known, one in _named(values, prefixes).items()
    }
    settings["launch.backend"] = Setting("backend", backend, inherited=True)
    return Found("nemo-rl", "nemo-rl", settings)


def _within(value: Any, values: Mapping[str, Any], section: str = "") -> Any:
    """Return the value that ``${policy.name}`` or ``${multiply:4, ${.name}}`` means."""
    for _ in range(_MOST_FILES):
        if not isinstance(value, str) or "${" not in value:
            return value
        product = re.fullmatch(r"\$\{(multiply|divide|mul|div):\s*(\d+)\s*,\s*(\d+)\}", value)
        if product is not None:
            one, other = int(product[2]), int(product[3])
            return one * other if product[1].startswith("mul") else one // max(other, 1)
        found = re.search(r"\$\{(?:oc\.select:)?(\.*)(\w[\w.]*)\}", value)
        name = "" if found is None else _absolute(section, found[1], found[2])
        name = name if name in values else name.removeprefix("training.")
        if found is None or name not in values:
            return value
        whole = found[0] == value
        value = values[name] if whole else value.replace(found[0], str(values[name]))
    return value


def _absolute(section: str, dots: str, name: str) -> str:
    """Return the whole name that a relative one means: a dot is this section, two its parent."""
    if not dots:
        return name
    above = section.rstrip(".").split(".")
    return ".".join([*above[: len(above) - len(dots) + 1], name])


def _trained_sizes(path: Path, name: str) -> Settings:
    """Return the model's sizes from the recipe of the launcher that trained it, ``gpt3_5b``."""
    family, _, size = name.partition("_")
    for up in path.resolve().parents:
        # chatglm3_6b is chatglm/chatglm3-6b, and llama_7b the first of its family.
        names = (size, name, name.replace("_", "-"), f"{family}1_{size}")
        families = (family, family.rstrip("0123456789"))
        for file in (up / "training" / one / f"{end}.yaml" for one in families for end in names):
            if file.is_file():
                table = parse_yaml(read_text(file), where=str(file))
                model = _part(table, "model") if isinstance(table, dict) else {}
                values = leaves({"model": model})
                return {
                    key: Setting(key, _within(value, values, "model."), inherited=True)
                    for key, value in model.items()
                    if not isinstance(value, dict | list) and _OF_MODEL.search(key)
                }
    return {}


_OF_MODEL = re.compile(
    r"layers$|hidden_size|heads$|query_groups|kv_channels|vocab|activation$|bias$|embedding|dropout$|"
    r"seq_length|normalization"
)


def _nemo_launcher(path: Path, table: Mapping[str, Any]) -> Found | None:
    model, trainer = _part(table, "model"), table.get("trainer")
    if not isinstance(trainer, dict) or not set(model) & {"micro_batch_size", "global_batch_size",
                                                         "tensor_model_parallel_size"}:  # fmt: skip
        return None
    if {"inference", "server", "chat"} & set(table):
        return Found("nemo", no_training="it generates text and trains nothing")
    if {"restore_from_path", "checkpoint_folder", "input_name_or_path"} & set(table) or (
        "optim" not in model and "data" not in model
    ):
        return Found("nemo", no_training="it converts or reads a checkpoint and trains nothing")
    values = leaves(table)
    prefixes = {
        "model.data.train_ds.": "", "model.": "", "trainer.num_nodes": "launch.nnodes",
        "trainer.devices": "launch.nproc_per_node", "trainer.precision": "precision",
    }  # fmt: skip
    settings = _named(values, prefixes)
    settings = {
        name: Setting(one.written, _within(one.value, values, f"{one.written.rpartition('.')[0]}."))
        for name, one in settings.items()
    }
    beside = [name for name in settings if re.search("mm_cfg|unet|vision", name)]
    if beside and all(name.startswith("mm_cfg.") for name in beside) and "num_layers" in settings:
        settings["launch.tower"] = Setting("mm_cfg", value=True, inherited=True)
    elif beside:
        message = "images or other than text go beside the language model"
        return Found("nemo", "megatron", settings, trouble=(message, "such have no price"))
    named = settings.get("run.model_train_name")
    if "num_layers" not in settings and named is not None:
        settings = _trained_sizes(path, str(named.value)) | settings
    if "num_layers" in settings:
        yaml = {"launch.yaml": Setting("model", value=True, inherited=True)}
        return Found("nemo", "megatron", settings | yaml)
    settings["launch.backend"] = Setting("backend", "megatron_cfg", inherited=True)
    message = "the model's sizes stand in a checkpoint, or are of a kind that has no price"
    trouble = (message, "give its config.json with --model")
    why = None if named is not None else trouble
    return Found("nemo", "nemo", settings, trouble=why, sizes=True)


def _automodel(_path: Path, table: Mapping[str, Any]) -> Found | None:
    model = _part(table, "model")
    target = str(model.get("_target_", "")) + str(table.get("recipe", ""))
    names = {"pretrained_model_name_or_path", "config"} & set(model)
    if "generate" in target.lower() or "inference" in table:
        return Found("automodel", no_training="it generates and trains nothing") if (
            "distributed" in table
        ) else None  # fmt: skip
    if not ({"step_scheduler", "distributed", "recipe"} & set(table)):
        return None
    prefixes = {
        "model.config.": "", "autopipeline.": "pipeline.", "distributed.": "",
        "step_scheduler.": "", "packed_sequence.": "",
        "dataset.seq_length": "seq_length", "dataset.seq_len": "seq_length",
        "dataset.max_length": "max_length", "dataset.max_seq_length": "max_seq_length",
        "model.": "", "parallelizer.": "", "fsdp.": "", "ddp.": "",
        "dist_env.nproc_per_node": "launch.nproc_per_node",
        "ci.nodes": "launch.nnodes", "benchmark.num_nodes": "launch.nnodes",
        "ci.nproc_per_node": "launch.nproc_per_node",
        "benchmark.nproc_per_node": "launch.nproc_per_node",
    }  # fmt: skip
    settings = _named(leaves(table), prefixes)
    if not names:
        what = "recipe_args" if "recipe_args" in table else "model"
        message = f"{what} names no language model that is trained whole"
        hint = "give its config.json with --model"
        sizes = "recipe_args" not in table
        return Found("automodel", "automodel", settings, trouble=(message, hint), sizes=sizes)
    return Found("automodel", "automodel", settings)


def _bridge(_path: Path, table: Mapping[str, Any]) -> Found | None:
    train = _part(table, "train")
    if not set(train) & {"global_batch_size", "micro_batch_size"} or "items" in table:
        return None
    settings = {name: Setting(name, value) for name, value in leaves(table).items()}
    message = "it changes a recipe of Megatron-Bridge that is a Python function"
    return Found("bridge", "bridge", settings, trouble=(message, "check what that function gives"))
