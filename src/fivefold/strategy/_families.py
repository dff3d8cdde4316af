"""Families of models as ``families.toml`` declares them, and a configuration's keys as read.

A family is one table: what its code builds, and which keys of a ``config.json`` say how large. A
value that begins with ``$`` is the key that says it (``$a|b``: the first of those that the file
has); any other value is what the code always does. ``like`` names a family whose table it extends.
``defaults`` are the values that transformers takes where a file does not say them.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from fivefold.errors import DataError, UnsupportedError
from fivefold.reading import Reading

Config = Mapping[str, Any]
_OWN = ("defaults", "reads", "classes", "parents", "like")  # what a family does not inherit

_HARMLESS = {
    "says where the file comes from":
        r"_?name_or_path transformers_version transformers\.js_config auto_map model_type "
        r"_commit_hash architectures tokenizer_class unsloth_.* custom_pipelines "
        r"torchscript name nemo_version model_max_length base_model.* license",
    "how published weights are stored: a plan says its own precision":
        r"torch_dtype dtype quantization_config compression_config expert_dtype .*_in_fp32 fp32_.* "
        r"mamba_ssm_cache_dtype mamba_ssm_dtype enable_moe_fp32_combine enable_lm_head_fp32",
    "names a token":
        r".*token_(id|index|ids) .*_token suppress_tokens begin_suppress_tokens forced_.*",
    "positions by rotation or by slopes have no parameters":
        r"rope_.* .*_rope_.* rotary_.* mrope_.* .*rope_theta.* use_rope alibi.* default_theta "
        r"partial_rotary_factor original_max_position_embeddings .*rotary_(dim|pct|emb_base) "
        r"position_embedding_type swa_rope_theta use_mem_rope no_rope_layers layer_rope_theta",
    "starting values change no size":
        r"initializer.* .*initializer_range init_.* .*_init rescale_.* initializer_cutoff_factor "
        r".*_init_variance_scale",
    "keeps a division finite": r".*_eps .*_epsilon .*_eps_.* eps",
    "multiplies or cuts off values, which costs next to nothing":
        r".*_scale .*_scaling .*_multipliers? .*softcapping .*soft_cap scale_emb scale_depth "
        r".*_attn_scalar .*_alpha .*_beta .*_(alpha|beta)_factor dim_model_base .*scaling_factor "
        r"mup_.* attn_temperature.* clip_qkv floor_scale scale_attn.* scale_embedding hc_.*iters "
        r"residual_multiplier logits_scaling",
    "how a program runs, which a plan says itself":
        r"use_cache .*return_dict output_.* gradient_checkpointing keys_to_ignore.* _attn_.* "
        r"cache_implementation num_logits_to_keep use_mambapy use_mamba_kernels use_flash.* "
        r"ep_size use_associative_scan use_mem_eff_path attn_implementation _flash_attn.* "
        r"pretraining_tp slow_but_exact use_kernels? "
        r"reorder_and_upcast_attn moe_shared_expert_overlap "
        r"moe_permute_fusion chunk_size_feed_forward is_llama_config recurrent_kv_cache_mode",
    "how a router weighs experts, not how many there are":
        r".*aux_loss.* .*z_loss.* .*jitter.* norm_topk_prob scoring_func topk_method .*norm_min "
        r"seq_aux route_norm .*renormalize .*_score_func(tion)? expert_selection_fn routing_func "
        r".*combination_strategy score_function .*apply_router_weight.* router_dtype "
        r"moe_router_(?!topk|bias|enable).* load_balancing.* use_grouped_topk moe_layer_norm_type",
    "nothing of it is kept by fused attention, or by the layers":
        r"attention_dropout attn_pdrop attn_dropout attention_probs_dropout_prob layerdrop "
        r"classifier_.* summary_.* activation_dropout embd_pdrop embedding_dropout embed_dropout "
        r"drop_path.* mlp_dropout",
    "for generating, or for other tasks":
        r"id2label label2id num_labels problem_type finetuning_task task_specific_params "
        r"temperature top_k top_p do_sample max_length min_length repetition_penalty "
        r"length_penalty num_beams.* no_repeat_ngram_size early_stopping "
        r"diversity_penalty bad_words_ids "
        r"typical_p num_return_sequences exponential_decay_length_penalty "
        r"encoder_no_repeat.* max_new_tokens "
        r"remove_invalid_values tf_legacy_loss use_bfloat16 pruned_heads tie_encoder_decoder "
        r"generation_config is_encoder_decoder decoder_start_token_id prefix",
    "values of a recurrence's step":
        r"time_step_(?!rank).* .*dt_(min|max|limit|init_floor|scale) linear_(a_log|dt)_.* "
        r"A_initializer_range lambda_std_dev linear_allow_neg_eigval mamba_norm_before_gate",
}  # fmt: skip
_PREDICTED = "transformers builds no layers that predict further tokens: they are not counted"
_UNCOUNTED = {
    "num_nextn_predict_layers": _PREDICTED, "mtp_num_hidden_layers": _PREDICTED,
    "num_mtp_modules": _PREDICTED, "num_mtp_layers": _PREDICTED, "mtp_num_layers": _PREDICTED,
    "use_mtp": _PREDICTED, "mtp_transformer_layers": _PREDICTED,
}  # fmt: skip
"""Keys of what the model may have and is not counted, and why."""
_NONE: tuple[Any, ...] = (None, False, 0, "", [], {})
_HARMLESS_KEYS = [(re.compile("|".join(keys.split())), why) for why, keys in _HARMLESS.items()]


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """Return the families by name, what they inherit filled in."""
    text = (files("fivefold.strategy") / "families.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {name: _whole(name, tables) for name in tables}


def _whole(name: str, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    own = tables[name]
    if "like" not in own:
        return own
    base = _whole(own["like"], tables)
    return _merged({k: v for k, v in base.items() if k not in _OWN}, own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both and key != "defaults" else value
    return found


class Keys:
    """The keys of a configuration as its family reads them, each noted where it is looked at.

    Args:
        config: The file's keys and values.
        family: A name of ``families()``.
        reading: Takes the account.
        prefix: Of the names in it, for a part of a larger file.
    """

    def __init__(self, config: Config, family: str, reading: Reading, *, prefix: str = "") -> None:
        self.config, self.family, self.reading, self.prefix = config, family, reading, prefix
        self.table = families()[family]
        self.defaults: Mapping[str, Any] = self.table.get("defaults", {})
        self._read: set[str] = set()

    def beside(self, changes: Config) -> Keys:
        """Return the keys of a layer that has some of its own."""
        found = Keys({**self.config, **changes}, self.family, self.reading, prefix=self.prefix)
        found._read = self._read
        return found

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first key that the file has, or what its family takes."""
        present = [name for name in names if name in self.config]
        for other in present[1:]:
            if other in self._read or self.config[other] == self.config[present[0]]:
                self._take(other)
            elif (whole := self.prefix + other) not in self.reading.names():
                why = f"it is not {present[0]}, which says the same and was read"
                self.reading.leave_out(whole, why, decisive=True)
        if present:
            self._take(present[0])
            return self.config[present[0]]
        for name in names:
            if name in self.defaults:
                self._assume(name, self.defaults[name])
                return self.defaults[name]
        return default

    def said(self, name: str) -> bool:
        """Return whether the file has a key."""
        return self.config.get(name) is not None

    def _known(self) -> Iterator[str]:
        """Yield the keys that the family reads, in a model that needs them."""
        tables: list[Mapping[str, Any]] = [self.table]
        while tables:
            for key, value in tables.pop().items():
                if isinstance(value, Mapping) and key not in {
                    "defaults",
                    "only",
                    "by_layer",
                    "all_of",
                    "equal",
                }:
                    tables.append(value)
                elif isinstance(value, str) and value.startswith("$"):
                    yield from value[1:].split("|")
        for part in ("defaults", "only", "by_layer", "all_of", "equal", "reads"):
            yield from self.table.get(part, ())

    def _take(self, name: str) -> None:
        if name not in self._read:
            self._read.add(name)
            self.reading.take(self.prefix + name)

    def _assume(self, name: str, value: Any) -> None:
        if name not in self._read:
            self._read.add(name)
            self.reading.assume(
                self.prefix + name, value, f"what a {self.family} takes where the file is silent"
            )

    def of(self, name: str, default: Any = None) -> Any:
        """Return what the family says of a name, its key's value where it names one."""
        value = self._written(name)
        if value is None:
            return default
        if isinstance(value, str) and value.startswith("$"):
            found = self.get(*value[1:].split("|"))
            return default if found is None else found
        return value

    def _written(self, name: str) -> Any:
        value: Any = self.table
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def flag(self, name: str) -> bool:
        """Return whether the family does something."""
        value = self.of(name, False)
        if not isinstance(value, bool | int | float):
            raise self._wrong(self.names_of(name), value, "true or false")
        return bool(value)

    def size(self, name: str, *, least: int = 1) -> int:
        """Return a size that the family must have."""
        value = self.of(name)
        if value is None:
            message = f"the model's configuration has none of {self.names_of(name)}"
            raise DataError(message, hint="is it the config.json of a whole model?")
        return self.whole(self.names_of(name), value, least=least)

    def size_or(self, name: str, default: int, *, least: int = 0) -> int:
        """Return a size, or ``default`` where neither file nor family says it."""
        value = self.of(name)
        if value is None or (value == 0 and self._written(name) == 0):
            return default
        return self.whole(self.names_of(name), value, least=least)

    def names_of(self, name: str) -> str:
        """Return the keys that say something, for messages."""
        value = self._written(name)
        text = value[1:] if isinstance(value, str) else name
        present = [key for key in text.split("|") if key in self.config]
        return present[0] if present else text.replace("|", ", ")

    def whole(self, name: str, value: Any, *, least: int = 1) -> int:
        """Return a value that must be a whole number."""
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not math.isfinite(value) or value != int(value) or int(value) < least:
            raise self._wrong(name, value, "a whole number" if least else "0 or a whole number")
        return int(value)

    def _wrong(self, name: str, value: Any, allowed: str) -> DataError:
        message = f"{name} of the model's configuration must be {allowed}; got {value!r:.60}"
        return DataError(message, hint="is it the config.json of a transformer?")

    def refuse(self, name: str, why: str) -> UnsupportedError:
        """Return the error for a value that has no price."""
        message = f"a {self.family} with {name}={self.config.get(name)!r:.60} {why}"
        return UnsupportedError(message, hint="describe what is near it under [model] of a job")

    def account(self) -> None:
        """Give every key of the file that nobody looked at its place."""
        ignored, known = self.table.get("ignored", ()), set(self._known())
        for name in self.reading.missing(self.prefix + key for key in self.config):
            key = name.removeprefix(self.prefix)
            if key in known:
                self.reading.take(name, "decides nothing in this model")
                continue
            why = f"changes no size of a {self.family}" if key in ignored else harmless(key)
            if why is not None:
                self.reading.ignore(name, why)
                continue
            value = self.config[key]
            if key in _UNCOUNTED:
                self.reading.leave_out(name, _UNCOUNTED[key], decisive=value not in _NONE)
                continue
            off = value is None or value is False or value in ("", [], {})
            self.reading.leave_out(
                name, f"nothing that is known of a {self.family} reads it", decisive=not off
            )


def harmless(key: str) -> str | None:
    """Return why a key changes nothing that is priced; None where it may."""
    return next((why for keys, why in _HARMLESS_KEYS if keys.fullmatch(key)), None)
