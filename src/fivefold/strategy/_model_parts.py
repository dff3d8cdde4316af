"""The blocks of a layer that a family's table describes, of the sizes that a configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.errors import UnsupportedError
from fivefold.strategy._families import Keys
from fivefold.strategy.parts import (
    LatentAttention,
    MambaMixer,
    MixtureOfExperts,
    Scores,
    WeightMatrix,
)

_DELTA_CHUNK = 64


@dataclass(frozen=True)
class Part:
    """A block: the usual letter it may have, what it is made of, and what ``ModelSpec`` says then.

    Two parts are the same block where all of it is equal, but for a window.
    """

    kind: str
    name: str
    matrices: tuple[WeightMatrix, ...]
    vectors: int
    scores: tuple[Scores, ...] = ()
    scan_flops: float = 0.0
    window: int = 0
    fields: tuple[tuple[str, Any], ...] = ()


def norm_size(keys: Keys, width: int, *, bias: bool | None = None) -> int:
    """Return the parameters of a norm: a weight for each column, and a shift where there is one."""
    if not keys.of("norm", True):
        return 0
    return width * (2 if (keys.flag("norm_bias") if bias is None else bias) else 1)


def _norms(keys: Keys, part: str) -> int:
    """Return the parameters of the norms before and after a block."""
    count = int(keys.of(f"{part}_norms", 1)) + int(keys.flag("post_norms"))
    if part == "feed_forward" and keys.flag("parallel"):
        both = keys.of("parallel_norms")  # 1: one norm serves attention and feed-forward part
        two = keys.flag("parallel_norms_two") if both is None else both == 2
        count = int(two)
    return count * norm_size(keys, keys.size("hidden"))


class Parts:
    """The blocks of a configuration."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.hidden, self.heads = keys.size("hidden"), keys.size_or("heads", 1, least=1)

    def mixer(self, word: str, *, reuses: bool = False) -> Part:
        """Return the block of a word of ``mixers``; one may reuse keys and values of another."""
        if word == "linear":
            return self._linear()
        if word == "conv":
            return self._convolution()
        if word == "hybrid":
            return self._hybrid()
        if self.keys.of("compressed"):
            return self._compressed(word)
        if self.keys.of("latent"):
            return self._latent(indexed=word == "indexed", windowed=word == "sliding")
        return self._attention(word, reuses=reuses)

    def _of(self, word: str, name: str, default: int) -> int:
        """Return a size of layers of a kind, which may have their own."""
        general = self.keys.size_or(name, default, least=1)
        if self.keys.said("per_layer_config"):  # then the layer's own keys say it
            return general
        return self.keys.size_or(f"{word}.{name}", general, least=1)

    def _window(self, word: str) -> int:
        if word == "chunked":
            # A token sees half a chunk in the mean, as with such a window.
            return self.keys.size_or("chunk", 0) // 2
        return self.keys.size_or("window", 0) if word == "sliding" else 0

    def _kv_heads(self, word: str, heads: int) -> int:
        keys = self.keys
        if keys.of("one_kv_head") and not keys.of("one_kv_head_unless"):
            return 1
        found = keys.size_or("kv_heads", heads, least=1) * int(keys.of(f"{word}.kv_times", 1))
        if not keys.said("per_layer_config"):
            found = keys.size_or(f"{word}.kv_heads", found, least=1)
        if heads % found:
            raise keys.contradiction({"heads": heads, "kv_heads": found})
        return found

    def _width(self, word: str, heads: int) -> int:
        """Return the columns of a head: what the file says, or its share of the hidden size."""
        keys = self.keys
        said = keys.says("head_dim") or keys.says(f"{word}.head_dim")
        # A few classes have such defaults.
        if self.hidden % heads and not (said or keys.usual_of("hidden", "heads")):
            raise keys.contradiction({"hidden": self.hidden, "heads": heads})
        return self._of(word, "head_dim", max(self.hidden // heads, 1))

    def _attention(self, word: str, *, reuses: bool) -> Part:
        keys, h = self.keys, self.hidden
        heads = self._of(word, "heads", self.heads)
        kv_heads = self._kv_heads(word, heads)
        width = self._width(word, heads)
        value = self._of(word, "value_dim", width)
        queries, shared = heads * width, keys.flag(f"{word}.keys_are_values")
        if keys.of("square") and queries != h:  # whose last product is square
            message = (
                f"a {keys.family} with {heads} heads of {width} has products that have no price"
            )
            hint = "its code wants hidden_size = num_attention_heads x head_dim"
            raise UnsupportedError(message, hint=hint)
        gate = str(keys.of("gate") or "") if keys.of("gate_on", True) else ""
        matrices = [WeightMatrix("q_proj", h, queries * (2 if gate == "query" else 1), "columns")]
        if not reuses:
            matrices.append(WeightMatrix("k_proj", h, kv_heads * width, "columns"))
        if not reuses and not shared:
            matrices.append(WeightMatrix("v_proj", h, kv_heads * value, "columns"))
        if gate in {"head", "all"}:
            columns = heads * (1 if gate == "head" else value)
            matrices.append(WeightMatrix("g_proj", h, columns, "columns"))
        scores = Scores(
            heads=heads, kv_heads=kv_heads, width=width, value_width=value,
            window=self._window(word), **self._index(word, h, matrices),
        )  # fmt: skip
        matrices.append(WeightMatrix("o_proj", heads * value, h, "rows"))
        vectors = self._vectors(heads, kv_heads, width, value, gate)
        vectors += heads * int(keys.of(f"{word}.sinks", keys.of("sinks", False)) or 0)
        if word == "indexed":
            vectors += self._index_vectors()
        if reuses:
            vectors -= norm_size(keys, width) * (keys.of("qk_norm", "") == "head")
            vectors -= kv_heads * (keys.flag("k_bias") * width + keys.flag("v_bias") * value)
        plain = not (gate or shared or reuses or value != width or word == "indexed")
        fields = (("num_heads", heads), ("num_kv_heads", kv_heads), ("head_dim", width))
        return Part(
            "*" if plain else "", f"{word} attention" if not plain else "attention",
            tuple(matrices), vectors + _norms(keys, "mixer"), (scores,),
            window=scores.window, fields=fields if plain else (),
        )  # fmt: skip

    def _vectors(self, heads: int, kv_heads: int, width: int, value: int, gate: str) -> int:
        """Return the parameters of biases, of norms of heads, and others, in attention."""
        keys, h, queries = self.keys, self.hidden, heads * width
        found = keys.flag("q_bias") * queries * (2 if gate == "query" else 1)
        found += keys.flag("k_bias") * kv_heads * width + keys.flag("v_bias") * kv_heads * value
        found += keys.flag("o_bias") * h
        if gate == "all":
            found += keys.flag("gate_bias") * heads * value
        kind = keys.of("qk_norm", "")
        if kind and keys.of("qk_norm_on", True):
            sizes = {
                "head": 2 * width, "all": (heads + kv_heads) * width,
                "each": (heads + kv_heads) * width, "heads": 2 * queries,
            }  # fmt: skip
            found += sizes[kind] * (2 if keys.flag("qk_norm_bias") else 1)
        found += queries * int(keys.flag("sub_norm"))
        found += int(keys.of("head_vectors", 0)) * width
        return int(found)

    def _index(self, word: str, inputs: int, matrices: list[WeightMatrix]) -> dict[str, int]:
        """Add the indexer's products, and return what of scores it computes and leaves."""
        if word != "indexed":
            return {}
        keys, h = self.keys, self.hidden
        heads, width = keys.size("index.heads"), keys.size("index.width")
        chosen = keys.size("index.chosen") * keys.size_or("index.block", 1, least=1)
        matrices += [
            WeightMatrix("index_q_proj", inputs, heads * width, "none"),
            WeightMatrix("index_k_proj", h, width, "none"),
        ]
        if keys.of("index.weights", True):
            matrices.append(WeightMatrix("index_weights_proj", h, heads, "none"))
        return {"chosen": chosen, "index_columns": heads * width}

    def _index_vectors(self) -> int:
        return int(self.keys.of("index.norms", 2)) * self.keys.size("index.width")

    def _latent(self, *, indexed: bool, windowed: bool) -> Part:
        keys, h, heads = self.keys, self.hidden, self.heads
        nope, rope = keys.size("latent.width"), keys.size("latent.rope")
        rank, kv_rank = keys.size_or("latent.q_rank", 0), keys.size("latent.kv_rank")
        value = keys.size_or("latent.value", h // heads, least=1)
        biased = keys.flag("latent.bias")
        query = heads * (nope + rope)
        matrices = [WeightMatrix("q_proj", h, query, "columns")]
        if rank:
            matrices = [
                WeightMatrix("q_a_proj", h, rank, "none"),
                WeightMatrix("q_b_proj", rank, query, "columns"),
            ]
        matrices += [
            WeightMatrix("kv_a_proj_with_mqa", h, kv_rank + rope, "none"),
            WeightMatrix("kv_b_proj", kv_rank, heads * (nope + value), "columns"),
        ]
        index = self._index("indexed" if indexed else "", rank or h, matrices)
        matrices.append(WeightMatrix("o_proj", heads * value, h, "rows"))
        vectors = _norms(keys, "mixer") + norm_size(keys, rank) + norm_size(keys, kv_rank)
        vectors += biased * ((rank or 0) + kv_rank + rope + h)
        vectors += self._index_vectors() if indexed else 0
        window = keys.size_or("window", 0) if windowed else 0
        fields: dict[str, Any] = {
            "num_heads": heads, "head_dim": nope,
            "latent": LatentAttention(q_rank=rank, kv_rank=kv_rank, rope_dim=rope, value_dim=value),
        }  # fmt: skip
        scores = Scores(
            heads=heads,
            kv_heads=heads,
            width=nope + rope,
            value_width=value,
            window=window,
            **index,
        )
        return Part(
            "" if indexed else "*", "indexed latent attention" if indexed else "latent attention",
            tuple(matrices), int(vectors), (scores,), window=window,
            fields=() if indexed else tuple(fields.items()),
        )  # fmt: skip

    def _linear(self) -> Part:
        kind = self.keys.of("linear.kind")
        made = {
            "mamba": self._mamba, "mamba2": self._mamba, "delta": self._delta, "kda": self._kimi,
            "lightning": self._lightning, "lru": self._gated_recurrence,
        }.get(str(kind))  # fmt: skip
        if made is None:
            message = f"a model of type {self.keys.family!r} has layers that have no price: linear"
            raise UnsupportedError(message, hint="describe what is near it under [model] of a job")
        return made()

    def _mamba(self) -> Part:
        keys, first = self.keys, self.keys.of("linear.kind") == "mamba"
        sizes: dict[str, Any] = {"state": keys.size("linear.state")}
        if first:
            expanded = keys.size("linear.expand") * self.hidden
            inner = keys.size_or("linear.inner", expanded, least=1)
            rank = keys.of("linear.rank", "auto")
            rank = -(-self.hidden // 16) if rank == "auto" else keys.whole("time_step_rank", rank)
            sizes |= {"heads": inner, "step_rank": rank}
        else:
            heads, width = keys.size("linear.heads"), keys.of("linear.head_dim", "auto")
            if width == "auto":
                inner = keys.size_or("linear.inner", int(keys.of("linear.expand", 2) * self.hidden))
                width = inner // heads
            sizes |= {"heads": heads, "head_dim": keys.whole("head_dim", width),
                      "groups": keys.size("linear.groups"),
                      "chunk": keys.size("linear.chunk")}  # fmt: skip
        sizes |= {
            "kernel": keys.size("linear.kernel"),
            "biases": bool(keys.of("linear.bias", True)),
        }
        mixer = MambaMixer(**sizes)
        vectors = mixer.vector_parameters + (mixer.inner if first else 0)
        vectors += int(keys.of("linear.norms", False)) * (mixer.step_rank + 2 * mixer.state)
        both = keys.flag("linear.products_bias")
        if both or keys.flag("linear.in_bias"):
            vectors += 2 * mixer.inner if first else mixer.projected
        if both or keys.flag("linear.out_bias"):
            vectors += self.hidden
        return Part("M", "mamba", (), vectors + _norms(keys, "mixer"), fields=(("mamba", mixer),))

    def _hybrid(self) -> Part:
        """Return attention and Mamba-2 side by side, of one norm (Falcon-H1)."""
        attention, part = self._attention("full", reuses=False), self._mamba()
        mixer: MambaMixer = dict(part.fields)["mamba"]
        h, vectors = self.hidden, part.vectors - _norms(self.keys, "mixer")
        vectors -= 0 if self.keys.flag("linear.last_norm") else mixer.inner
        matrices = (
            *attention.matrices[:-1], WeightMatrix("in_proj", h, mixer.projected, "columns"),
            attention.matrices[-1], WeightMatrix("out_proj", mixer.inner, h, "rows"),
        )  # fmt: skip
        return Part(
            "", "attention beside mamba", matrices, attention.vectors + vectors, attention.scores,
            mixer.scan_flops,
        )  # fmt: skip

    def _compressed(self, word: str) -> Part:
        """Return attention to a window and to compressed tokens, all or chosen (DeepSeek-V4)."""
        keys, h, heads = self.keys, self.hidden, self.heads
        width, rank = keys.size("head_dim"), keys.size("compressed.q_rank")
        groups, out = keys.size("compressed.groups"), keys.size("compressed.rank")
        matrices = [
            WeightMatrix("q_a_proj", h, rank, "none"),
            WeightMatrix("q_b_proj", rank, heads * width, "columns"),
            WeightMatrix("kv_proj", h, width, "none"),
            WeightMatrix("o_a_proj", heads * width // groups, out, "none", groups),
        ]
        vectors = rank + width + heads + _norms(keys, "mixer") + self.hyper_vectors()
        one: dict[str, Any] = {"heads": heads, "kv_heads": 1, "width": width, "value_width": width}
        scores = [Scores(**one, window=keys.size("window"))]
        if word != "sliding":
            rate, twice = self._rate(word), 2 if word == "compressed_sparse" else 1
            matrices += [
                WeightMatrix(f"compressor_{n}_proj", h, twice * width, "none")
                for n in ("kv", "gate")
            ]
            vectors += rate * twice * width + width
            index: dict[str, int] = {}
            if word == "compressed_sparse":
                index = self._index("indexed", rank, matrices)
                each = index["index_columns"] // keys.size("index.heads")
                del matrices[-2]  # one key of a few tokens, instead of one of each
                matrices += [WeightMatrix(f"index_{n}_proj", h, 2 * each, "none")
                             for n in ("kv", "gate")]  # fmt: skip
                vectors += rate * 2 * each + each
            scores.append(Scores(**one, every=rate, **index))
        matrices.append(WeightMatrix("o_b_proj", groups * out, h, "rows"))
        return Part("", f"{word} attention".replace("_", " "), tuple(matrices), vectors,
                    tuple(scores))  # fmt: skip

    def _rate(self, word: str) -> int:
        """Return how many tokens are compressed to one."""
        plain = {"compressed_sparse": 4, "heavily_compressed": 128}[word]
        return self.keys.count(f"compress_rates.{word}_attention", default=plain, least=1)

    def hyper_vectors(self) -> int:
        """Return the parameters that mix several residual streams before and after a block."""
        streams = self.keys.size_or("streams", 0)
        mixed = (2 + streams) * streams
        return mixed * (streams * self.hidden + 1) + 3 if streams else 0

    def _delta(self) -> Part:
        """Return a gated delta net: queries, keys, values, a gate, two numbers a head."""
        keys, h = self.keys, self.hidden
        k_heads = keys.size_or("linear.key_heads", self.heads, least=1)
        heads = keys.size_or("linear.heads", self.heads, least=1)
        width = keys.size_or("linear.key_dim", int(0.75 * h / k_heads), least=1)
        value = keys.size_or("linear.value_dim", 2 * width, least=1)
        columns, values = k_heads * width, heads * value
        matrices = (
            WeightMatrix("in_proj_qkv", h, 2 * columns + values, "columns"),
            WeightMatrix("in_proj_z", h, values, "columns"),
            WeightMatrix("in_proj_ba", h, 2 * heads, "columns"),
            WeightMatrix("out_proj", values, h, "rows"),
        )
        vectors = (2 * columns + values) * keys.size("linear.kernel") + 2 * heads + value
        return Part(
            "", "gated delta net", matrices, vectors + _norms(keys, "mixer"),
            scan_flops=heads * _delta_flops(width, value),
        )  # fmt: skip

    def _kimi(self) -> Part:
        """Return Kimi's delta net, whose decay is of every channel."""
        keys, h = self.keys, self.hidden
        heads, width = keys.size("linear.heads"), keys.size("linear.key_dim")
        kernel = keys.size("linear.kernel")
        columns = heads * width
        matrices = (
            *(WeightMatrix(f"{n}_proj", h, columns, "columns") for n in "qkv"),
            WeightMatrix("f_a_proj", h, width, "none"), WeightMatrix("g_a_proj", h, width, "none"),
            WeightMatrix("f_b_proj", width, columns, "columns"),
            WeightMatrix("g_b_proj", width, columns, "columns"),
            WeightMatrix("b_proj", h, heads, "columns"),
            WeightMatrix("o_proj", columns, h, "rows"),
        )  # fmt: skip
        vectors = 3 * columns * kernel + columns + heads + width
        return Part(
            "", "Kimi delta net", matrices, vectors + _norms(keys, "mixer"),
            scan_flops=heads * _delta_flops(width, width),
        )  # fmt: skip

    def _lightning(self) -> Part:
        """Return linear attention in blocks: scores inside one, a state between them."""
        keys, h = self.keys, self.hidden
        width = keys.size_or("head_dim", h // self.heads)
        inner, block = self.heads * width, keys.size("linear.chunk")
        matrices = (
            WeightMatrix("qkv_proj", h, 3 * inner, "columns"),
            WeightMatrix("output_gate", h, inner, "columns"),
            WeightMatrix("out_proj", inner, h, "rows"),
        )
        flops = self.heads * (4.0 * block * width + 4.0 * width * width)
        return Part(
            "", "lightning attention", matrices, inner + _norms(keys, "mixer"), scan_flops=flops
        )

    def _gated_recurrence(self) -> Part:
        """Return a real-gated recurrence, whose two gates are block-diagonal (RecurrentGemma)."""
        keys, h = self.keys, self.hidden
        width = keys.size_or("linear.inner", h, least=1)
        each = width // self.heads
        matrices = (
            WeightMatrix("linear_y", h, width, "columns"),
            WeightMatrix("linear_x", h, width, "columns"),
            *(WeightMatrix(f"{name}_gate", each, each, "columns", self.heads)
              for name in ("input", "recurrent")),
            WeightMatrix("linear_out", width, h, "rows"),
        )  # fmt: skip
        vectors = width * (2 + keys.size("linear.kernel") + 1 + 1 + 2) + h
        return Part(
            "", "gated recurrence", matrices, vectors + _norms(keys, "mixer"), scan_flops=10 * width
        )

    def _convolution(self) -> Part:
        """Return a gated short convolution (LFM2)."""
        keys, h = self.keys, self.hidden
        matrices = (
            WeightMatrix("in_proj", h, 3 * h, "columns"), WeightMatrix("out_proj", h, h, "rows"),
        )  # fmt: skip
        vectors = h * keys.size("linear.kernel") + keys.flag("linear.bias") * (h + 3 * h + h)
        return Part("", "short convolution", matrices, vectors + _norms(keys, "mixer"))

    def dense(self, width: int | None = None) -> Part:
        """Return a dense feed-forward part."""
        keys, h = self.keys, self.hidden
        inner = width or keys.size_or("ffn", 4 * h, least=1) // int(keys.of("ffn_halved", 1))
        if keys.of("ffn_rounded") and keys.get("block_auto_adjust_ff_dim"):
            multiple = keys.whole("block_multiple_of", keys.get("block_multiple_of"))
            inner = int(float(keys.get("block_ffn_dim_multiplier") or 1.0) * (2 * inner // 3))
            inner = -(-inner // multiple) * multiple
        gated = keys.flag("gated")
        ups = ("gate_proj", "up_proj") if gated else ("up_proj",)
        matrices = (
            *(WeightMatrix(name, h, inner, "columns") for name in ups),
            WeightMatrix("down_proj", inner, h, "rows"),
        )
        vectors = keys.flag("up_bias") * inner * len(ups) + keys.flag("down_bias") * h
        vectors += inner * int(keys.flag("ffn_norm")) + int(keys.of("ffn_vectors", 0))
        vectors += _norms(keys, "feed_forward")
        return Part("-", "feed-forward", matrices, int(vectors), fields=(("ffn", inner),))

    def experts(self) -> Part:
        """Return an expert part."""
        keys, h = self.keys, self.hidden
        count, inner = keys.size("experts.count"), keys.size("experts.ffn")
        shared = keys.size_or("experts.shared", 0)
        shared = shared or keys.size_or("experts.shared_count", 0) * (
            keys.size_or("experts.shared_ffn", 0) or inner
        )
        latent = keys.size_or("experts.latent", 0)
        moe = MixtureOfExperts(
            num_experts=count, top_k=keys.size("experts.top_k"), expert_ffn=inner,
            shared_ffn=shared, latent=latent, biases=keys.flag("experts.bias"),
            groups=keys.size_or("experts.groups", 1, least=1),
            top_groups=keys.size_or("experts.top_groups", 0) or None,
        )  # fmt: skip
        ups = 2 if keys.flag("gated") else 1
        vectors = count * int(keys.flag("experts.router_bias"))
        vectors += h * int(bool(shared) and keys.flag("experts.shared_gate"))
        vectors += int(bool(shared) and keys.flag("experts.shared_bias")) * (ups * shared + h)
        vectors += int(bool(latent) and keys.flag("experts.latent_bias")) * (h + latent)
        vectors += int(keys.of("experts.norms", 0)) * norm_size(keys, h)
        vectors += self.hyper_vectors()
        if keys.of("experts.beside"):  # a dense part, which has the layer's norms
            vectors += count
        else:
            vectors += _norms(keys, "feed_forward")
        return Part("E", "experts", (), int(vectors), fields=(("experts", moe),))

    def per_layer_input(self) -> Part | None:
        """Return the products of an embedding that each layer has for itself (Gemma 3n)."""
        keys, h = self.keys, self.hidden
        width = keys.size_or("per_layer_input", 0)
        if not width:
            return None
        matrices = [
            WeightMatrix("per_layer_model_projection", h, width, "none"),
            WeightMatrix("per_layer_input_gate", h, width, "none"),
            WeightMatrix("per_layer_projection", width, h, "rows"),
        ]
        vectors = norm_size(keys, h)
        if rank := keys.size_or("residual_rank", 0):
            matrices += [WeightMatrix("laurel_left", h, rank, "none"),
                         WeightMatrix("laurel_right", rank, h, "rows")]  # fmt: skip
            vectors += norm_size(keys, h)
        if streams := keys.size_or("alternating", 0):
            vectors += streams * (streams + streams**2 + h) + h
            vectors += h * int(bool(keys.get("altup_correct_scale", default=True)))
        return Part("", "per-layer input", tuple(matrices), vectors)


def _delta_flops(width: int, value: int) -> float:
    """Return the FLOPs of a head's delta rule for a token, in chunks of C.

    2 C for each of three products of keys and two of values, and six of keys with values.
    """
    return 2.0 * _DELTA_CHUNK * (3 * width + 2 * value) + 6.0 * width * value
