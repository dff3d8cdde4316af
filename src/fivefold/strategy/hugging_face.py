"""Models from a Hugging Face ``config.json``, and the account of what was read of it.

The file does not say what the family's code makes of it: whether the feed-forward part has a gate,
what a missing key means, which layers have experts. So only families are read that
``families.toml`` declares, for which as many parameters are found as transformers makes; a family
that nobody checked is refused and not read as a Llama. Every key is read, assumed, left out by name
or harmless for a reason.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import DataError, FivefoldError, UnsupportedError
from fivefold.files import read_json
from fivefold.reading import Reading
from fivefold.strategy._families import Config, Keys, families, harmless
from fivefold.strategy._layer_kinds import feed_forwards, mixers
from fivefold.strategy._model_parts import Part, Parts, norm_size
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import Block

_LOG = logging.getLogger(__name__)
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_ACTIVATIONS = frozenset(
    [
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
        "gelu_python",
        "gelu_python_tanh",
        "quick_gelu",
        "gelu_10",
        "gelu_accurate",
        "relu",
        "relu2",
        "relu6",
        "sigmoid",
        "tanh",
        "mish",
        "leaky_relu",
        "laplace",
        "linear",
        "xielu",
        "swiglu",
        "swigluoai",
        "geglu",
        "hardswish",
        "silu_and_mul",
    ]
)
_MOST_LAYERS = 10_000
_OWN_GATE = {"swiglu", "swigluoai", "geglu"}


def is_configuration(source: str) -> bool:
    """Return whether a model's name is a file of this form, or the folder that holds one."""
    path = Path(source)
    return path.suffix == ".json" or path.is_dir()


def read_model(path: Path | str, *, seq_len: int | None = None) -> tuple[ModelSpec, Reading]:
    """Return the model that a ``config.json`` describes, and the account of its keys.

    Args:
        path: The file, or the folder that holds it.
        seq_len: Tokens of a sample; None: the longest that the model takes.

    Raises:
        DataError: The file is missing, not JSON, or lacks a size.
        UnsupportedError: The model is of a family that is not known, or has layers of a kind that
            has no price.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path, what="model configuration", finite=False)
    if not isinstance(config, dict):
        raise DataError(f"{path} does not hold a JSON object", hint="is it a config.json?")
    reading = Reading(str(path))
    name = path.parent.name or path.stem
    try:
        model = model_of_config(config, reading, name=name, seq_len=seq_len)
    except FivefoldError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError,
            ValueError) as error:  # fmt: skip
        message = f"{path} has a wrong or missing entry: {error!r}"
        raise DataError(message, hint="is it the config.json of a transformer?") from error
    reading.log()
    for note in reading.decisive():
        _LOG.warning("%s: not counted: %s", path, note)
    return model, reading


def model_from_hugging_face(
    config: Config, *, name: str = "model", seq_len: int | None = None
) -> ModelSpec:
    """Return the model of the keys of a ``config.json``; the library itself is not needed.

    Raises:
        UnsupportedError: The model is of a family that is not known, or has layers of a kind that
            has no price.
        DataError: A size is missing.
    """
    return model_of_config(config, Reading(name), name=name, seq_len=seq_len)


def model_of_config(
    config: Config, reading: Reading, *, name: str = "model", seq_len: int | None = None
) -> ModelSpec:
    """Return the model as ``model_from_hugging_face`` does, and fill in the account of its keys."""
    family = family_of(config)
    text, prefix = _language_model(config, family, reading)
    keys = Keys(text, family, reading, prefix=prefix, doubtful=bool(prefix))
    # In a part the defaults of its class are usual, where it says anything of its sizes.
    enough = prefix and any(map(keys.says_itself, ("hidden", "layers", "vocab")))
    for entry in ("hidden",) if keys.of("pattern") else ("hidden", "layers"):
        if not enough and not keys.says_itself(entry):
            message = f"the model's configuration has none of {prefix}{keys.names_of(entry)}"
            raise DataError(message, hint="is it the config.json of a whole model?")
    if "model_type" in text:
        reading.take(f"{prefix}model_type", f"the family {family}")
    model = _Reader(keys).model(name=name, seq_len=seq_len)
    keys.account()
    return model


def _language_model(config: Config, family: str, reading: Reading) -> tuple[Config, str]:
    """Return the keys of the language model, and where they stand; the rest has its place."""
    text, prefix = config, ""
    tied = config.get("tie_word_embeddings")
    part = next((key for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)), None)
    while part is not None:
        beside, text, inside = text, text[part], f"{prefix}{part}."
        _account_of_parent(beside, part, prefix, Keys(text, family, Reading("")), reading)
        prefix = inside
        part = "text_config" if isinstance(text.get("text_config"), Mapping) else None
    if not prefix:
        return config, ""
    if not reading.decisive():
        why = "the file has a language model and more"
        reading.assume("other parts", "none", why, decisive=True)
    if tied is None:
        return text, prefix
    if text.get("tie_word_embeddings", tied) != tied:
        why = f"{prefix}tie_word_embeddings says something else"
        reading.assume("tied embedding", tied, why, decisive=True)
    return {**text, "tie_word_embeddings": tied}, prefix


def _account_of_parent(
    config: Config, part: str, prefix: str, keys: Keys, reading: Reading
) -> None:
    """Give the keys beside a part their place; a size that the part has too must be the same."""
    for key, value in config.items():
        name, why = prefix + key, harmless(key, value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == part:
            reading.take(name, "the language model")
        elif key == "tie_word_embeddings":
            reading.take(name)
        elif number and keys.knows(key):
            same = keys.has(key) and keys.config[key] == value
            if same:
                reading.ignore(name, f"{part} says the same")
            else:
                reading.leave_out(name, f"{part} does not say the same", decisive=True)
        elif why is not None:
            reading.ignore(name, why)
        else:
            beside = isinstance(value, Mapping) and key.endswith("_config")
            why = "only the language model is counted"
            reading.leave_out(name, why, decisive=beside)


@functools.cache
def _names() -> tuple[dict[str, str], dict[str, str]]:
    """Return the families by class, and by the type of a model that they are a part of."""
    classes = {one: name for name, table in families().items() for one in table.get("classes", ())}
    parents = {one: name for name, table in families().items() for one in table.get("parents", ())}
    return classes, parents


def family_of(config: Config) -> str:
    """Return the family that a configuration is of: by its type, its class, or its parent's type.

    Raises:
        UnsupportedError: Nothing says it, or the family is not known.
    """
    classes, parents = _names()
    texts = (config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping))
    part: Config = next(texts, {})
    part = part.get("text_config", part)
    said = str(part.get("model_type") or config.get("model_type") or "")
    if part and not part.get("model_type"):
        said = parents.get(said, said)
    if said in families():
        return said
    listed = [*(part.get("architectures") or ()), *(config.get("architectures") or ())]
    by_class = next((classes[one] for one in listed if one in classes), None)
    if by_class is not None and (not said or said in families()[by_class].get("parents", ())):
        return by_class
    if said in parents:
        return parents[said]
    if not said:
        named = f", and its class {listed[0]!r} is not known" if listed else " nor architectures"
        message = f"the configuration has no model_type{named}: it does not say what is built of it"
        hint = "add the model_type of the program that wrote it; or describe the model under "
        raise UnsupportedError(message, hint=hint + "[model] in a job file")
    message = f"models of type {said!r} cannot be read from a config.json: the type is not verified"
    hint = "describe the model under [model] in a job file; in a copy with the model_type of a "
    hint += "known family (llama, qwen3_moe, deepseek_v3, ...), each key that this family does not "
    hint += "have is named as left out: what such a key adds is then not counted"
    raise UnsupportedError(message, hint=hint)


class _Reader:
    """Turns the keys of a configuration into a model."""

    def __init__(self, keys: Keys) -> None:
        self.keys, self.parts = keys, Parts(keys)

    def model(self, *, name: str, seq_len: int | None) -> ModelSpec:
        """Return the model."""
        keys = self.keys
        self._check()
        layers = self._layers()
        if max(keys.size_or("streams", 0), keys.size_or("alternating", 0)) > 1:
            why = "the other streams are counted in parameters, not in memory and time"
            keys.reading.assume("residual streams", 1, why, decisive=True)
        hidden = keys.size("hidden")
        fields: dict[str, Any] = {
            "hidden": hidden, "num_layers": len(layers), "num_heads": self.parts.heads,
            "seq_len": self._seq_len(seq_len), "vocab": self._vocabulary(),
            "gated": keys.flag("gated"), "clamped": bool(keys.of("clamped")),
            "tied": keys.flag("tied"), "learned_positions": bool(keys.of("positions")),
            "dropout": self._dropout(), "biases": bool(keys.of("norm_bias")),
            "causal": bool(keys.of("causal", True)), "embeds_tokens": not keys.of("vision"),
        }  # fmt: skip
        if keys.of("vision"):
            fields["patch"] = keys.size("patch")
        fields |= self._spelled(layers)
        outside = (("embedding", self._embedding()), ("head", self._head()))
        # A vision model's patches and positions follow from its sample.
        fields["vectors"] = (*fields["vectors"], *outside[1 if keys.of("vision") else 0 :])
        return ModelSpec(name=name, **fields)

    def _check(self) -> None:
        """Refuse what has no price, whatever the sizes."""
        keys = self.keys
        kind = keys.of("activation")
        if kind is not None and str(kind) not in _ACTIVATIONS:
            names = keys.names_of("activation")
            message = (
                f"{names}={kind!r} of the model's configuration is no activation that is known"
            )
            raise UnsupportedError(message, hint="describe the model under [model] in a job file")
        if str(kind) in _OWN_GATE and not keys.flag("gated"):
            raise keys.refuse(keys.names_of("activation"), "has a gate that its family has not")
        for key, plain in keys.table.get("only", {}).items():
            allowed = plain if isinstance(plain, list) else [plain]
            value = keys.get(key, default=allowed[0])
            if value not in allowed and not (value is None and False in allowed):
                raise keys.refuse(key, "has products that have no price")
        for key, word in keys.table.get("all_of", {}).items():
            if set(keys.get(key) or ()) - {word}:
                raise keys.refuse(key, "has layers that have no price")
        for key, name in keys.table.get("equal", {}).items():
            if keys.get(key) is not None and keys.get(key) != keys.size(name):
                raise keys.refuse(key, "has products that have no price")

    def _layers(self) -> list[list[Part]]:
        keys, pattern = self.keys, self.keys.of("pattern")
        if pattern:
            letters = pattern_letters(keys)
            said = keys.size_or("layers", len(letters), least=1) if keys.says("layers") else None
            if said not in {None, len(letters)}:
                message = f"{keys.names_of('layers')}={said}, but {len(letters)} layers are listed"
                raise DataError(message, hint="correct the number or the list of layers")
            return [[self._lettered(letter)] for letter in letters]
        count = keys.size("layers")
        if count > _MOST_LAYERS:  # each is looked at
            message = f"{keys.names_of('layers')}={count} is more than {_MOST_LAYERS:,} layers"
            raise DataError(message, hint="is it the config.json of a transformer?")
        kinds, seconds = mixers(keys, count), feed_forwards(keys, count)
        made = functools.cache(self._layer)
        own = self._own_keys(count)
        first = count - keys.size_or("reused", 0)  # from it on, keys and values are another's
        if not 0 < first <= count:
            raise keys.refuse(keys.names_of("reused"), f"has {count} layers")
        return [
            made(kind, second, own[place], reuses=place >= first)
            for place, (kind, second) in enumerate(zip(kinds, seconds, strict=True))
        ]

    def _layer(
        self, kind: str, second: str, own: tuple[tuple[str, Any], ...], *, reuses: bool
    ) -> list[Part]:
        keys = self.keys.beside(dict(own)) if own else self.keys
        parts = Parts(keys)
        layer = [parts.mixer(kind, reuses=reuses)]
        if keys.of("alone"):  # a mixer is the whole layer
            return layer
        if second == "experts":
            layer.append(parts.experts())
        elif reuses and keys.of("doubles"):
            layer.append(parts.dense(2 * keys.size("ffn")))
        else:
            layer.append(parts.dense())
        if keys.of("experts.beside"):
            layer.append(parts.experts())
        extra = parts.per_layer_input()
        return layer if extra is None else [*layer, extra]

    def _own_keys(self, count: int) -> list[tuple[tuple[str, Any], ...]]:
        """Return the keys that each layer has of its own: listed by layer, or by key."""
        keys = self.keys
        said = keys.get("per_layer_config") if "per_layer_config" in keys.config else None
        by_layer = {int(place): dict(own) for place, own in (said or {}).items()}
        found = [by_layer.get(place, {}) for place in range(count)]
        for key, name in keys.table.get("by_layer", {}).items():
            listed = keys.get(key)
            for place, value in enumerate(listed if isinstance(listed, list) else ()):
                if place < count:
                    found[place][name] = value
        return [tuple(sorted(own.items())) for own in found]

    def _lettered(self, letter: str) -> Part:
        made = {
            "*": lambda: self.parts.mixer("full"), "M": lambda: self.parts.mixer("linear"),
            "-": self.parts.dense, "E": self.parts.experts,
        }  # fmt: skip
        return made[letter]()

    def _spelled(self, layers: list[list[Part]]) -> dict[str, Any]:
        """Return pattern, blocks and vectors: the usual letters for what most layers have."""
        every = Counter(part for layer in layers for part in layer)
        usual: dict[str, Part] = {}
        for part, _ in every.most_common():
            if part.kind:
                usual.setdefault(part.kind, part)
        letters: dict[Part, str] = {}
        vectors: dict[str, int] = {}
        blocks: list[Block] = []
        free = iter("abcdefghijklmnopqrstuvwxyz")
        windows = {part.window for part in every if part.kind == "*" and part.window}
        for part in every:
            first = usual.get(part.kind)
            same = first is not None and (part.fields, part.vectors) == (
                first.fields,
                first.vectors,
            )
            if same and len(windows) <= 1:
                letters[part] = part.kind
                vectors[part.kind] = part.vectors
                continue
            if not part.matrices:
                raise UnsupportedError(
                    f"a {self.keys.family} whose layers have different {part.name} has no price",
                    hint="describe what is near it under [model] of a job",
                )
            letter = next(free)
            letters[part], vectors[letter] = letter, part.vectors
            blocks.append(
                Block(letter=letter, name=part.name, matrices=part.matrices, scores=part.scores,
                      scan_flops=part.scan_flops)
            )  # fmt: skip
        return self._fields(layers, usual, letters, blocks, vectors)

    def _fields(
        self, layers: list[list[Part]], usual: dict[str, Part], letters: dict[Part, str],
        blocks: list[Block], vectors: dict[str, int],
    ) -> dict[str, Any]:  # fmt: skip
        """Return what ``ModelSpec`` says of layers whose blocks have their letters."""
        words = ["".join(letters[part] for part in layer) for layer in layers]
        every = dict.fromkeys(part for layer in layers for part in layer)
        fields: dict[str, Any] = {"blocks": tuple(blocks), "vectors": tuple(vectors.items())}
        for kind, part in usual.items():
            if kind in vectors:
                fields |= dict(part.fields)
        if "*" not in vectors:
            scored = next((one for part in every for one in part.scores), None)
            if scored is not None:
                fields |= {"num_heads": scored.heads, "num_kv_heads": scored.kv_heads,
                           "head_dim": scored.width}  # fmt: skip
        attending = [part for layer in layers for part in layer if letters[part] == "*"]
        windowed = [part.window for part in attending if part.window]
        if windowed:
            fields["window"] = windowed[0]
            if len(windowed) < len(attending):
                fields["windowed_layers"] = len(windowed)
        return fields | _pattern(words, fields)

    def _seq_len(self, wanted: int | None) -> int:
        if wanted is None:
            return self._length()
        self.keys.of("length")
        return wanted

    def _length(self) -> int:
        """Return the tokens of the longest sample that the model takes."""
        if self.keys.of("vision"):
            return self._patches() + 1
        return self.keys.size("length")

    def _patches(self) -> int:
        return int((self.keys.size("image") // self.keys.size("patch")) ** 2)

    def _vocabulary(self) -> int:
        if not self.keys.of("vision"):
            return self.keys.size("vocab")
        labels = self.keys.get("id2label")
        if labels is None:
            return self.keys.whole("num_labels", self.keys.get("num_labels", default=2))
        return len(labels)

    def _dropout(self) -> bool:
        names = ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout",
                 "residual_dropout", "resid_dropout")  # fmt: skip
        return any(float(self.keys.get(name) or 0.0) > 0 for name in names)

    def _embedding(self) -> int:
        """Return the parameters beside the embedding: positions, kinds of tokens, norms."""
        keys, hidden = self.keys, self.parts.hidden
        found = 0
        if keys.of("positions") and not keys.of("vision"):
            rows = keys.size("length") + int(keys.of("positions_more", 0))
            found += rows * hidden
        found += keys.size_or("token_types", 0) * hidden
        found += int(keys.of("embedding_norms", 0)) * norm_size(keys, hidden)
        width = keys.size_or("per_layer_input", 0)
        if width:
            found += keys.size("per_layer_vocab") * width * keys.size("layers") + width
        return found

    def _head(self) -> int:
        """Return the parameters beside the head: the last norm, a bias, a layer before it."""
        keys, hidden = self.keys, self.parts.hidden
        norms = int(keys.of("last_norms", 1)) * norm_size(keys, hidden)
        biases = int(keys.flag("head_bias"))
        if biases and keys.of("head_bias_twice") and not keys.flag("tied"):
            biases = 2  # where head and embedding are two, so are their biases
        norms += biases * self._vocabulary()
        if keys.of("head_layer"):
            norms += hidden * (hidden + 1) + norm_size(keys, hidden)
        norms += int(keys.of("patch_vectors", 0)) * hidden
        if streams := keys.size_or("streams", 0):
            norms += streams * (streams * hidden + 1) + 1
        if streams := keys.size_or("alternating", 0):  # products to the streams and back
            norms += 2 * (streams - 1) * hidden * hidden
        return norms


def pattern_letters(keys: Keys) -> str:
    """Return a letter a layer, as hybrids of blocks list them."""
    pattern = keys.get("hybrid_override_pattern")
    listed = keys.get("layer_types", "layers_block_type")
    if pattern is not None:
        letters = str(pattern).replace("|", "")
        unknown = sorted(set(letters) - set("M*-E"))
        if unknown:
            key, why = "hybrid_override_pattern", f"has {''.join(unknown)!r}, which is not known"
            raise keys.refuse(key, why)
        if listed and letters != _letters_of(listed, keys):
            message = "hybrid_override_pattern and the listed types of layers are not the same"
            raise DataError(message, hint="leave one of them out")
        return letters
    if not listed:
        message = "the configuration has neither hybrid_override_pattern nor layers_block_type"
        raise DataError(message, hint=f"a {keys.family} needs one of them")
    return _letters_of(listed, keys)


def _letters_of(listed: list[Any], keys: Keys) -> str:
    known = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
             "mlp": "-", "moe": "E"}  # fmt: skip
    unknown = sorted({str(kind) for kind in listed if kind not in known})
    if unknown:
        message = f"a model of type {keys.family!r} has layers that have no price: {unknown}"
        raise UnsupportedError(message, hint=f"layers_block_type may have {', '.join(known)}")
    return "".join(known[kind] for kind in listed)


def _pattern(words: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the pattern of layers; none for attention with a feed-forward part in all of them."""
    experts = words.count("*E")
    leading = len(words) - experts
    if words == ["*-"] * leading + ["*E"] * experts:
        if not experts:
            return {}
        return {"experts": dataclasses.replace(fields["experts"], dense_layers=leading)}
    if all(len(word) == 1 for word in words) and len(words) > 1:
        return {"pattern": "".join(words)}
    return {"pattern": " ".join(words)}
