"""Public rows outside the project as models, plans and clusters, with what their recipes say.

What a table does not print is read in the source's own scripts and named here.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError
from fivefold.strategy import (
    Cluster,
    ModelSpec,
    ParallelPlan,
    evaluate_plan,
    load_cluster,
    load_model,
)
from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.parts import LowRankAdapters
from fivefold.strategy.plan import plan_problem

__all__ = ["PublicRow", "read_folder"]

_FILES = ("bigscience_a100", "dlperf", "megatron_bridge", "nemo")
_UNUSABLE = ("not judged", "time unusable")
# What a table misprints: its own column of accumulation steps says one sample.
_CORRECTED = {"L608b": {"mbs": "1"}}
# Plans that cannot be as printed: states, or states and activations, are far beyond 288 GB.
_IMPOSSIBLE = {"26.02.01 L399", "26.02.01 L401"}
# Layers whose activations the recipes of Megatron-Bridge offload under FSDP, by model and device:
# scripts/performance, tag v0.3.0, cpu_offloading_num_layers.
_OFFLOADED = {
    ("llama3-70b", "GB300"): 20, ("llama3-70b", "GB200"): 40, ("llama3-405b", "GB200"): 92,
}  # fmt: skip
_NAMED = ("deepseek-v3", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "kimi-k2",
          "nemotron-3-nano")  # fmt: skip
# NeMo's defaults, LoraPEFTConfig of 24.07: adapter_dim, and attention_qkv alone.
# Dispatchers, from the recipes of Megatron-Bridge (tags v0.1.0rc4 to v0.3.1): DeepEP or HybridEP,
# but a plain all-to-all where tokens are dropped, which asserts it, and for GPT-OSS.
_ALL_TO_ALL = " all-to-all"
_ADAPTERS = LowRankAdapters(rank=32, modules=("q_proj", "k_proj", "v_proj"))
_PLAIN: dict[str, Any] = {
    "tied": False, "learned_positions": False, "dropout": False, "biases": False, "gated": True,
}  # fmt: skip


@dataclass(frozen=True)
class PublicRow:
    """One measured run; candidates where the source does not print the whole plan."""

    case: str
    group: str
    cluster: str
    model: ModelSpec | None
    plans: tuple[ParallelPlan, ...]
    measured_s: float | None
    memory_bytes: float | None
    out_of_memory: bool

    @property
    def title(self) -> str:
        """The group, with layers of Mamba apart: rows split by group, as when none had a plan."""
        mamba = self.model is not None and self.model.mamba is not None
        return "MoE with Mamba, 26.02.01" if mamba else self.group

    def device(self) -> DeviceSpec:
        """Where it ran."""
        return _cluster(self.cluster).device

    def predict(self) -> tuple[float, float, float] | None:
        """Seconds, bytes and the device's bytes of the fastest candidate; None: not expressible."""
        model = self.model
        if model is None:
            return None
        cluster = _cluster(self.cluster)
        found = [
            evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
            for plan in self.plans
            if plan_problem(model, plan) is None
        ]
        if not found:
            return None
        fitting = [one for one in found if one.fits]
        best = min(fitting or found, key=lambda one: one.time_s)
        return best.time_s, best.memory.total_bytes, cluster.device.memory_bytes


@functools.cache
def _cluster(name: str) -> Cluster:
    name, _, dispatcher = name.partition(" ")
    base, _, release = name.partition("-bridge-")
    if not release and not dispatcher:
        return load_cluster(name)
    lines = [f'base = "{base}-bridge"', f'stack = "megatron-bridge-{release}"'] if release else [
        f'base = "{name}"'
    ]  # fmt: skip
    if dispatcher:
        lines += ["[device]", "dispatches_once = false"]
    with tempfile.TemporaryDirectory() as folder:  # the same GPU under the stack of a release
        path = Path(folder) / "cluster.toml"
        path.write_text("\n".join(lines) + "\n")
        return load_cluster(path)


def read_folder(folder: Path) -> list[PublicRow]:
    """Rows of the folder's tables, without those that the source itself withdraws."""
    rows = []
    for name in _FILES:
        with (folder / f"{name}.csv").open() as file:
            for printed in csv.DictReader(file):
                place = printed["row_id"].split(":")[-1]
                entry = printed | _CORRECTED.get(place, {})
                usable = not any(words in entry["notes"] for words in _UNUSABLE)
                usable &= f"{entry['source'].split()[-1]} {place}" not in _IMPOSSIBLE
                if usable and (entry["step_s"] or entry["memory_gb"] == "OOM"):
                    rows.append(_row(name, entry))
    return rows


def _row(table: str, entry: dict[str, str]) -> PublicRow:
    memory, out = entry["memory_gb"], entry["memory_gb"] == "OOM"
    unit = 2**30  # nvidia-smi counts MiB
    model = _model(entry)
    plans: tuple[ParallelPlan, ...] = ()
    if model is not None:
        plans = tuple(_plans(table, model, entry))
    release = entry["source"].split()[-1]
    degrees = " ".join(
        f"{short}{entry[name]}"
        for short, name in zip("dtpvceb", ("dp", "tp", "pp", "vp", "cp", "ep", "mbs"), strict=True)
    )
    return PublicRow(
        case=f"{release} {entry['row_id'].split(':')[-1]} {entry['model']} {entry['gpus']} "
             f"{degrees} B{entry['gbs']} {entry['precision']}",
        group=_group(table, entry, model), model=model, plans=plans,
        cluster=_preset(table, entry) + _ALL_TO_ALL * _drops_or_is_plain(entry),
        measured_s=float(entry["step_s"]) if entry["step_s"] else None,
        memory_bytes=float(memory) * unit if memory and not out else None, out_of_memory=out,
    )  # fmt: skip


def _group(table: str, entry: dict[str, str], model: ModelSpec | None) -> str:
    if table == "bigscience_a100":
        return "A100 BigScience"
    if table == "dlperf":
        return "V100 DLPerf"
    device = entry["device"]
    if model is None or model.experts is not None:
        return f"MoE {entry['source'].split()[-1]}"
    seconds = float(entry["step_s"])
    if seconds < 0.5 or model.hidden <= 4096:
        return f"small {'H100' if device == 'H100' else 'Blackwell'}"
    return f"dense {device}"


def _preset(table: str, entry: dict[str, str]) -> str:
    if table == "bigscience_a100":
        return "a100-bigscience" + ("-bf16" if entry["precision"] == "bf16" else "")
    if table == "dlperf":
        return "v100-oneflow" if "OneFlow" in entry["source"] else "v100-dlperf"
    if "25." in entry["source"] and table == "megatron_bridge":
        return f"{entry['device'].lower()}-bridge-{entry['source'].split()[-1]}"
    stack = "bridge" if table == "megatron_bridge" else "nemo"
    device = entry["device"].lower()
    return "b200-bridge" if (device, stack) == ("b200", "nemo") else f"{device}-{stack}"


def _drops_or_is_plain(entry: dict[str, str]) -> bool:
    return "tokendrop" in entry["notes"] or entry["model"] == "gpt-oss-120b"


def _model(entry: dict[str, str]) -> ModelSpec | None:
    seq = int(entry["seq"])
    name = entry["model"].replace("_", "-")
    if name in _NAMED:
        model = load_model(name, seq_len=seq)
        # mtp_num_layers=1 in the recipe of DeepSeek-V3, but for rows that say otherwise.
        further = name == "deepseek-v3" and not any(
            words in entry["notes"] for words in ("w/o MTP", "tokendrop")
        )
        return dataclasses.replace(model, predicted_tokens=int(further))
    if not entry["layers"]:
        return None
    sizes = {key: int(entry[key]) for key in ("hidden", "ffn", "vocab")}
    shape: dict[str, Any] = {
        "name": entry["model"], "num_layers": int(entry["layers"]), "seq_len": seq,
        "num_heads": int(entry["heads"]), **sizes,
    }  # fmt: skip
    if entry["kv_heads"]:
        shape["num_kv_heads"] = int(entry["kv_heads"])
    if entry["task"] == "lora":
        shape["adapters"] = _ADAPTERS
    if entry["model"].startswith("llama"):
        return ModelSpec(**shape, **_PLAIN)
    if entry["model"].startswith("nemotron4"):  # squared ReLU: two matrices
        return ModelSpec(**shape, **{**_PLAIN, "gated": False})
    return ModelSpec(**shape)


def _plans(table: str, model: ModelSpec, entry: dict[str, str]) -> list[ParallelPlan]:
    def number(name: str) -> int:
        return int(entry[name] or 1)

    virtual, dtype = number("vp"), entry["precision"]
    plan: dict[str, Any] = {
        "global_batch": number("gbs"), "micro_batch": number("mbs"), "data": number("dp"),
        "tensor": number("tp"), "pipeline": number("pp"), "context": number("cp"),
        "expert": number("ep"), "zero": number("zero") if entry["zero"] != "0" else 0,
        "dtype": {"fp16": "bf16"}.get(dtype, dtype),
    }  # fmt: skip
    if table in {"bigscience_a100", "dlperf"}:
        plan |= {"recompute": "full", "embedding_layers": "embedding counts" in entry["notes"],
                 "data_overlap": "OneFlow" in entry["source"]}  # fmt: skip
        return _possible(model, [plan])
    plan |= {"sequence_parallel": plan["tensor"] > 1, "data_overlap": True}
    if model.experts is not None:  # expert_tensor_parallel_size=1 in all recipes
        plan["expert_tensor"] = 1
    if plan["tensor"] > 1:
        plan["tensor_overlap"] = "pipe"
    if entry["model"] in {"deepseek-v3", "kimi-k2"} and plan["pipeline"] > 1:
        plan["embedding_layers"] = True  # its layouts name embedding, prediction and loss
    if virtual > 1:
        plan |= {"virtual": virtual, "schedule": "interleaved", "pipeline_overlap": True}
        chunks = virtual * plan["pipeline"]
        plan.setdefault("embedding_layers", model.num_layers % chunks > 0)
    # recompute_modules: layernorm and moe_act of GPT-OSS, mla_up_proj of DeepSeek-V3
    lean = entry["model"] == "gpt-oss-120b" and "300" not in entry["device"]
    if lean or entry["model"] in {"deepseek-v3", "kimi-k2"}:
        plan["recompute"] = "selective"
    layers = _OFFLOADED.get((entry["model"], entry["device"]))
    if plan["zero"] == 3 and layers is not None:
        plan |= {"offload_activations": True, "offload_layers": layers}
    plans = [plan]
    if "micro-batch" in entry["notes"]:
        # NeMo's long-context recipes recompute where they must.
        plans = [
            {**plan, "micro_batch": b, "recompute": how}
            for b in (1, 2, 4)
            for how in ("none", "full")
        ]
    return _possible(model, plans)


def _possible(model: ModelSpec, plans: list[dict[str, Any]]) -> list[ParallelPlan]:
    """Plans that can run."""
    found = []
    for values in plans:
        try:
            found.append(ParallelPlan(**values))
        except ConfigurationError:
            continue
    return [plan for plan in found if plan_problem(model, plan) is None]
