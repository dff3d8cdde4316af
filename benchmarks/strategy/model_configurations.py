"""Reads the configuration of every causal language model of transformers, and counts parameters.

Each class is built on the meta device, small, with its default configuration and with one key after
another changed. An outcome is "equal" (as many parameters), "left out" (another number, and the
account names a key that was not counted), "refused" (by name) or "WRONG": another number without a
word.

    python -m benchmarks.strategy.model_configurations [--changes 12] [--only llama,gemma3_text]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.errors import FivefoldError
from fivefold.reading import Reading
from fivefold.strategy.hugging_face import model_of_config

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "model_configurations.json"
SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "n_embd": 256, "d_model": 256,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6, "n_layer": 6,
    "num_layers": 6, "intermediate_size": 320, "ffn_dim": 320, "moe_intermediate_size": 96,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "kv_lora_rank": 48, "q_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "pad_token_id": 0, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16, "vocab_size_per_layer_input": 1000,
    "max_position_embeddings": 512, "n_positions": 512,
}  # fmt: skip
"""Sizes of a small model; a class takes those that it has."""
_SKIPPED = {"transformers_version", "architectures", "dtype", "id2label", "label2id",
            "problem_type", "return_dict", "output_hidden_states", "output_attentions",
            "is_encoder_decoder", "chunk_size_feed_forward", "torch_dtype"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one configuration."""

    family: str
    change: str
    kind: str
    said: str = ""


def families() -> list[str]:
    """Return the types of all causal language models, and of language parts of other models."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - as above
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: PLC0415 - as above

    from fivefold.strategy._families import families as ours  # noqa: PLC0415 - as above

    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    texts = {name for name in CONFIG_MAPPING_NAMES if name.endswith("_text")}
    return sorted(causal | texts | (set(ours()) & set(CONFIG_MAPPING_NAMES)))


def small_sizes(family: str) -> dict[str, Any]:
    """Return the keys with which a class is small."""
    import transformers  # noqa: PLC0415 - reading the results needs no torch

    kind = transformers.CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    taken: dict[str, Any] = {}
    for key, value in SMALL.items():
        name = kind.attribute_map.get(key, key)
        if key in known and name not in taken:
            taken[name] = value
    return taken


def count_of_theirs(config: Any) -> int:
    """Return the parameters of the class of a configuration, without its vision part."""
    import torch  # noqa: PLC0415 - as above
    import transformers  # noqa: PLC0415 - reading the results needs no torch
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - as above

    with torch.device("meta"):
        if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            model = transformers.AutoModelForCausalLM.from_config(config)
        elif config.model_type.startswith("vit"):
            model = transformers.AutoModelForImageClassification.from_config(config)
        else:
            model = transformers.AutoModel.from_config(config)
            own = not getattr(config, "tie_word_embeddings", False)
            head = int(own) * int(config.vocab_size) * int(config.hidden_size)
            return head + sum(int(one.numel()) for one in model.parameters())
    return sum(int(one.numel()) for one in model.parameters())


def changes_of(family: str) -> Iterator[tuple[str, Any]]:
    """Yield one changed value for each key of a class that is no table."""
    import transformers  # noqa: PLC0415 - reading the results needs no torch

    kind = transformers.CONFIG_MAPPING[family]
    usual = small_sizes(family)
    for field in dataclasses.fields(kind):
        if field.name in _SKIPPED or field.name.startswith("_"):
            continue
        value = usual.get(field.name, field.default)
        if isinstance(value, bool):
            yield field.name, not value
        elif isinstance(value, int) and value < 2:
            yield field.name, value + 1
        elif isinstance(value, int):
            yield field.name, 2 * value
            yield field.name, max(value // 2, 1)
        elif value is None:
            yield field.name, 4
            yield field.name, True


def judge(family: str, change: dict[str, Any]) -> Outcome | None:
    """Return the outcome of a small configuration; None where transformers builds none."""
    import transformers  # noqa: PLC0415 - reading the results needs no torch

    name = ", ".join(f"{key}={value!r:.20}" for key, value in change.items()) or "default"
    try:
        config = transformers.CONFIG_MAPPING[family](**(small_sizes(family) | change))
        theirs = count_of_theirs(config)
        saved = json.loads(config.to_json_string(use_diff=True))
    except Exception:  # noqa: BLE001 - whatever their validation says, there is no such model
        return None
    reading = Reading(family)
    try:
        length = None if family.startswith("vit") else 256
        ours = model_of_config(saved, reading, seq_len=length).num_parameters
    except FivefoldError as error:
        return Outcome(family, name, "refused", str(error))
    if ours == theirs:
        return Outcome(family, name, "equal")
    decisive = ", ".join(note.name for note in reading.decisive())
    said = f"{ours} for {theirs}" + (f"; left out {decisive}" if decisive else "")
    return Outcome(family, name, "left out" if decisive else "WRONG", said)


def outcomes(family: str, *, changes: int, seed: int) -> list[Outcome]:
    """Return the outcomes of a class: default, and so many changes drawn at random (-1: all)."""
    drawn = [{key: value} for key, value in changes_of(family)]
    generator = random.Random(f"{seed} {family}")  # noqa: S311 - not for secrets
    if 0 <= changes < len(drawn):
        drawn = [
            {key: value for one in generator.sample(drawn, generator.choice((1, 1, 2)))
             for key, value in one.items()}
            for _ in range(changes)
        ]  # fmt: skip
    found = [judge(family, change) for change in ({}, *drawn)]
    return [one for one in found if one is not None]


def main() -> None:
    """Count and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = options.only.split(",") if options.only else families()
    found: dict[str, list[Outcome]] = {}
    for name in names:
        found[name] = outcomes(name, changes=options.changes, seed=options.seed)
        counts = Counter(one.kind for one in found[name])
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {dict(counts)}", flush=True)
        for one in found[name]:
            if one.kind in {"WRONG", "left out"}:
                print(f"    {one.kind}: {one.change}: {one.said}", flush=True)
    if not options.only:
        write(found)


def write(found: dict[str, list[Outcome]]) -> None:
    """Write the results file: classes by their default, configurations by what was changed."""
    rows = []
    default = Counter(
        next((one.kind for one in each if one.change == "default"), "not built by transformers")
        for each in found.values()
    )
    every = Counter(one.kind for each in found.values() for one in each)
    for case, counts in (("default of each class", default), ("a key or two changed", every)):
        for kind in ("equal", "left out", "refused", "WRONG", "not built by transformers"):
            wrong = kind == "WRONG"
            rows.append(
                BenchmarkRow(
                    case=case,
                    metric=kind,
                    unit="configurations",
                    ours=counts[kind],
                    target=0 if wrong else None,
                    met=counts[kind] == 0 if wrong else None,
                )
            )
    by_family = {name: Counter(one.kind for one in each) for name, each in found.items()}
    for name, counts in by_family.items():
        if counts["equal"]:
            rows.append(
                BenchmarkRow(
                    case=name,
                    metric="configurations with as many parameters",
                    unit="ratio",
                    ours=counts["equal"] / max(counts.total() - counts["refused"], 1),
                )
            )
    versions = {"transformers": version("transformers")}
    write_results(RESULTS, topic="strategy/model_configurations", rows=rows, versions=versions)


if __name__ == "__main__":
    main()
