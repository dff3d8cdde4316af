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
        r".*token_(id|index|ids) (bos|eos|pad|unk|sep|cls|mask|eod|image|video|audio)_token "
        r"suppress_tokens begin_suppress_tokens forced_.*",
    "positions by rotation or by slopes have no parameters":
        r"rope_.* .*_rope_.* rotary_.* mrope_.* .*rope_theta.* use_rope alibi.* default_theta "
        r"partial_rotary_factor original_max_position_embeddings rotary_dim "
        r".*rotary_(pct|emb_base) rope_factor rope_ratio rope_scaling_factor "
        r"rope_parameters rope_scaling no_rope_layer_interval no_rope_layers layer_rope_theta "
        r"position_embedding_type use_mem_rope",
    "starting values change no size":
        r"initializer.* .*initializer_range init_.* .*_init rescale_.* initializer_cutoff_factor "
        r".*_init_variance_scale",
    "keeps a division finite": r".*_eps .*_epsilon .*_eps_.* eps",
    "multiplies or cuts off values, which costs next to nothing":
        r".*_scale .*_scaling .*softcapping .*soft_cap scale_emb scale_depth "
        r".*_attn_scalar .*_alpha .*_beta dim_model_base (moe_)?routed_scaling_factor "
        r"scaling_factor router_scaling_factor (full_attn|linear_attn|mlp)_(alpha|beta)_factor "
        r"mup_enabled (embedding|residual|attention|key|lm_head|mlp)_multiplier "
        r"(attention|ssm)_(in|out)_multiplier (mlp|ssm)_multipliers attn_temperature.* clip_qkv "
        r"floor_scale scale_attn.* scale_embedding hc_.*iters logits_scaling",
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
        r"length_penalty num_beams num_beam_groups no_repeat_ngram_size early_stopping "
        r"diversity_penalty bad_words_ids "
        r"typical_p num_return_sequences exponential_decay_length_penalty "
        r"encoder_no_repeat_ngram_size max_new_tokens "
        r"remove_invalid_values tf_legacy_loss use_bfloat16 pruned_heads tie_encoder_decoder "
        r"generation_config is_encoder_decoder decoder_start_token_id prefix",
    "values of a recurrence's step":
        r"time_step_(limit|min|max|floor|scale|init_scheme) "
        r".*dt_(min|max|limit|init_floor|scale) linear_(a_log|dt)_.* "
        r"A_initializer_range lambda_std_dev linear_allow_neg_eigval mamba_norm_before_gate",
}  # fmt: skip


def _spelled_out(token: str) -> list[str]:
    """Return the names that a pattern lists: of (a|b)_c and (a_)?b all, of a wildcard none."""
    group = re.search(r"\(([^()]*)\)(\??)", token)
    if group is None:
        return [token] if re.fullmatch(r"\w+", token) else []
    words = [*group[1].split("|"), *([""] if group[2] else [])]
    return [
        name
        for word in words
        for name in _spelled_out(token[: group.start()] + word + token[group.end() :])
    ]


_PREDICTED = "transformers builds no layers that predict further tokens: they are not counted"
_UNCOUNTED = {
    "num_nextn_predict_layers": _PREDICTED, "mtp_num_hidden_layers": _PREDICTED,
    "num_mtp_modules": _PREDICTED, "num_mtp_layers": _PREDICTED, "mtp_num_layers": _PREDICTED,
    "use_mtp": _PREDICTED, "mtp_transformer_layers": _PREDICTED,
}  # fmt: skip
"""Keys of what the model may have and is not counted, and why."""
_ANY_TOP_K = (None, 0, 50)  # what transformers writes into files for generating
_NONE: tuple[Any, ...] = (None, False, 0, "", [], {})
_HARMLESS_KEYS = [(re.compile("|".join(keys.split())), why) for why, keys in _HARMLESS.items()]
_HARMLESS_NAMES = {
    name for keys in _HARMLESS.values() for token in keys.split() for name in _spelled_out(token)
}
_SIZED = re.compile(
    r"num|size|dim|layer|expert|head|ratio|factor|interval|rank|width|depth|group|kernel|block|"
    r"freq|every|state|vocab|window|top_?k|shared|inner|hidden|ffn|channel|count|multiple|length"
)
"""What the name of a size has in it: such a number is harmless only where its name is listed."""
_SIZELESS = re.compile(
    r".*(eps|epsilon|token_(id|index|ids)|(initializer|init)_range|soft_?cap(ping)?|rope_theta|"
    r"loss(_coef|_coefficient|_weight|_alpha)?|jitter(_noise|_eps)?|_std|variance_scale|dropout)"
)
_MAY_BE_NULL = frozenset(
    ["sliding_window", "num_key_value_heads", "attention_chunk_size", "q_lora_rank", "n_group",
     "topk_group", "mamba_d_ssm", "n_shared_experts", "num_shared_experts",
     "moe_num_shared_experts"]
)  # fmt: skip
"""Sizes for which null says something although their families have a default: none, or as many."""


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
        doubtful: Whether defaults of the hidden size and the layers are decisive.
    """

    def __init__(
        self, config: Config, family: str, reading: Reading, *, prefix: str = "",
        doubtful: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.family, self.reading, self.prefix = config, family, reading, prefix
        self.doubtful = doubtful
        self.table = families()[family]
        self.defaults: Mapping[str, Any] = self.table.get("defaults", {})
        self._read: set[str] = set()

    def beside(self, changes: Config) -> Keys:
        """Return the keys of a layer that has some of its own."""
        found = Keys({**self.config, **changes}, self.family, self.reading, prefix=self.prefix,
                     doubtful=self.doubtful)  # fmt: skip
        found._read = self._read
        return found

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first key that the file has, or what its family takes."""
        present = [name for name in names if self.has(name)]
        for other in present[1:]:
            if other in self._read or self._value(other) == self._value(present[0]):
                self._take(other)
            elif (whole := self.prefix + other) not in self.reading.names():
                why = f"it is not {present[0]}, which says the same and was read"
                self.reading.leave_out(whole, why, decisive=True)
        if present:
            self._take(present[0])
            return self._value(present[0])
        for name in names:
            if name in self.defaults:
                self._assume(name, self.defaults[name])
                return self.defaults[name]
        if default is not None:
            self._assume(names[0], default)
        return default

    def has(self, name: str) -> bool:
        """Return whether the file has a key; ``a.b`` is b in the table a."""
        table, _, key = name.rpartition(".")
        if not table:
            return name in self.config
        inner = self.config.get(table)
        if inner is not None and not isinstance(inner, Mapping):
            raise self._wrong(table, inner, "a table")
        return key in (inner or {})

    def _value(self, name: str) -> Any:
        table, _, key = name.rpartition(".")
        return self.config[table][key] if table else self.config[name]

    def said(self, name: str) -> bool:
        """Return whether the file has a key."""
        return self.has(name) and self._value(name) is not None

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number that a rule of layers counts with."""
        value = self.get(*names, default=default)
        if value is None and not any(self.has(name) for name in names):
            message = f"the model's configuration has none of {', '.join(names)}"
            raise DataError(message, hint="is it the config.json of a whole model?")
        present = next((name for name in names if self.has(name)), names[0])
        return self.whole(present, value, least=least)

    def listed(self, name: str, value: Any, count: int) -> list[Any]:
        """Return a list that has a value for each layer, without those for predicted tokens.

        Raises:
            DataError: It is no list, or of another length.
        """
        if not isinstance(value, list | tuple):
            raise self._wrong(name, value, f"a list of {count} values, one for each layer")
        more = [self.config.get(key) for key in _UNCOUNTED]
        longer = {count + one for one in more if isinstance(one, int)}
        if len(value) not in {count} | longer:
            message = f"{name} names {len(value)} of {count} layers"
            raise DataError(message, hint="one for each layer that the configuration counts")
        return list(value[:count])

    def _known(self) -> Iterator[str]:
        """Yield the keys that the family reads, in a model that needs them."""
        tables: list[Mapping[str, Any]] = [self.table]
        while tables:
            for key, value in tables.pop().items():
                if isinstance(value, Mapping) and key not in {
                    "defaults",
                    "only",
                    "usual",
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
            where = "says null" if self.has(name) else "is silent"
            why = f"what a {self.family} takes where the file {where}"
            decisive = self.doubtful and name in self._names("hidden", "layers")
            self.reading.assume(self.prefix + name, value, why, decisive=decisive)

    def _names(self, *entries: str) -> list[str]:
        """Return the keys that the family names in its entries."""
        written = [self._written(entry) for entry in entries]
        texts = [one[1:] for one in written if isinstance(one, str) and one.startswith("$")]
        return [name for text in texts for name in text.split("|")]

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
        names = self._names(name)
        present = next((one for one in names if self.has(one)), None)
        null = present is not None and self._value(present) is None
        if null and present not in _MAY_BE_NULL:
            usual = self._usual(name)
            if usual and isinstance(usual[0], int | float):
                allowed = f"a number, or left out: a {self.family} has {usual[0]} then"
                raise self._wrong(str(present), None, allowed)
        if names and (null or not (present or self.defaults.keys() & set(names))):
            if default:
                self._assume(present or names[0], default)
            elif present:
                self._take(present)
            return default
        value = self.of(name)
        if value is None or (value == 0 and self._written(name) == 0):
            return default
        return self.whole(self.names_of(name), value, least=least)

    def says(self, name: str) -> bool:
        """Return whether the file or the family's defaults say a size."""
        names = self._names(name)
        present = [one for one in names if self.has(one)]
        if present:
            return self._value(present[0]) is not None
        return bool(self.defaults.keys() & set(names)) or bool(not names and self._written(name))

    def says_itself(self, name: str) -> bool:
        """Return whether the file has one of the keys of an entry; true where it needs none."""
        names = self._names(name)
        return not names or any(self.has(one) for one in names)

    def usual_of(self, *entries: str) -> bool:
        """Return whether sizes are those that the family takes where a file is silent."""
        return all(self.of(entry) in self._usual(entry) for entry in entries)

    def _usual(self, entry: str) -> list[Any]:
        return [self.defaults[name] for name in self._names(entry) if name in self.defaults]

    def knows(self, key: str) -> bool:
        """Return whether the family reads a key."""
        return key in set(self._known())

    def names_of(self, name: str) -> str:
        """Return the keys that say something, for messages."""
        value = self._written(name)
        text = value[1:] if isinstance(value, str) else name
        present = [key for key in text.split("|") if self.has(key)]
        return present[0] if present else text.replace("|", ", ")

    def whole(self, name: str, value: Any, *, least: int = 1) -> int:
        """Return a value that must be a whole number."""
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not math.isfinite(value) or value != int(value) or int(value) < least:
            raise self._wrong(
                name, value, "a whole number above 0" if least else "0 or a whole number"
            )
        return int(value)

    def _wrong(self, name: str, value: Any, allowed: str) -> DataError:
        message = f"{name} of the model's configuration must be {allowed}; got {value!r:.60}"
        return DataError(message, hint="is it the config.json of a transformer?")

    def refuse(self, name: str, why: str) -> UnsupportedError:
        """Return the error for a value that has no price."""
        value = self._value(name) if self.has(name) else None
        message = f"a {self.family} with {name}={value!r:.60} {why}"
        return UnsupportedError(message, hint="describe what is near it under [model] of a job")

    def contradiction(self, sizes: dict[str, int]) -> DataError:
        """Return the error for a size that the file's other sizes do not divide."""
        (whole, value), (part, parts) = sizes.items()
        message = f"{self.names_of(whole)}={value} of the model's configuration is no multiple of "
        hint = "both stand in the configuration, or one follows from it: correct the wrong one"
        return DataError(message + f"{self.names_of(part)}={parts}", hint=hint)

    def account(self) -> None:
        """Give every key of the file that nobody looked at its place."""
        known = set(self._known()) | self._read
        tables = {name.rpartition(".")[0] for name in known} & self.config.keys()
        for table in sorted(tables):
            self._take(table)
            inner = self.config[table]
            for key in inner if isinstance(inner, Mapping) else ():
                self._place(f"{table}.{key}", inner[key], known)
        for key, value in self.config.items():
            self._place(key, value, known)

    def _place(self, key: str, value: Any, known: set[str]) -> None:
        name = self.prefix + key
        if not self.reading.missing([name]):
            return
        usual = self.table.get("usual", {})
        if key in usual:
            if value == usual[key]:
                self.reading.take(name, f"what a {self.family} always does")
            else:
                always = f"a {self.family} always has {usual[key]} of it"
                self.reading.leave_out(name, always, decisive=True)
            return
        if key in known:
            self.reading.take(name, "decides nothing in this model")
            return
        why = harmless(key, value, routed=bool(self.table.get("experts")))
        if key in self.table.get("ignored", ()):
            why = f"changes no size of a {self.family}"
        if why is not None:
            self.reading.ignore(name, why)
        elif key in _UNCOUNTED:
            self.reading.leave_out(name, _UNCOUNTED[key], decisive=value not in _NONE)
        else:
            off = value is None or value is False or value in ("", [], {})
            reason = f"nothing that is known of a {self.family} reads it"
            self.reading.leave_out(name, reason, decisive=not off)


def harmless(key: str, value: Any = None, *, routed: bool = False) -> str | None:
    """Return why a key changes nothing that is priced; None where it may.

    Args:
        key: The key.
        value: What the file says; a number whose name is one of a size may change something.
        routed: Whether the model has experts, of which a ``top_k`` would be.
    """
    if (key == "pruned_heads" and value) or (key == "top_k" and routed and value not in _ANY_TOP_K):
        return None
    name = key.rpartition(".")[2]
    sized = _SIZED.search(name) and not _SIZELESS.fullmatch(name)
    if sized and name not in _HARMLESS_NAMES and _has_number(value):
        return None
    return next((why for keys, why in _HARMLESS_KEYS if keys.fullmatch(name)), None)


def _has_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_number(one) for one in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
