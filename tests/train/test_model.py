"""The transformer against a slow reference in plain tensor operations, and closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from fivefold.errors import ConfigurationError
from fivefold.train._model import (
    Transformer,
    rms_norm,
    rotary_tables,
    split_rotated_heads,
    token_loss,
)
from fivefold.train.config import ModelConfig

SHAPES = [(1, 8, 1), (2, 12, 2), (3, 48, 4)]


def make_model(layers=2, width=16, heads=2, *, vocab=11, length=9, seed=0):
    config = ModelConfig(layers=layers, width=width, heads=heads)
    return Transformer(config, vocab_size=vocab, sequence_length=length, seed=seed)


def reference_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def reference_rotation(x):
    """Rotate pairs (j, j + K/2) of [T, K] as complex numbers, one position at a time."""
    length, width = x.shape
    half = width // 2
    rows = []
    for position in range(length):
        numbers = torch.complex(x[position, :half], x[position, half:])
        angles = [position * 10_000 ** (-2 * pair / width) for pair in range(half)]
        turned = numbers * torch.tensor(
            [complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128
        )
        rows.append(torch.cat([turned.real, turned.imag]))
    return torch.stack(rows)


def exact_tables(length, width):
    """Rotary tables in float64; the model's float32 ones would hide errors below 1e-7."""
    angles = [[t * 10_000 ** (-2 * j / width) for j in range(width // 2)] for t in range(length)]
    exact = torch.tensor(angles, dtype=torch.float64)
    return exact.cos(), exact.sin()


def reference_attention(q, k, v):
    length, width = q.shape
    rows = []
    for position in range(length):
        scores = torch.stack([q[position] @ k[past] for past in range(position + 1)])
        weights = torch.exp(scores / math.sqrt(width))
        rows.append((weights / weights.sum()) @ v[: position + 1])
    return torch.stack(rows)


def reference_logits(model, tokens):
    """Logits of one sequence, head by head and position by position."""
    parameters = dict(model.named_parameters())
    heads, width = model.config.heads, model.config.width
    x = parameters["embedding_VD"][tokens]
    for layer in range(model.config.layers):
        own = {
            name.split(".")[-1]: value
            for name, value in parameters.items()
            if name.startswith(f"blocks.{layer}.")
        }
        projected = reference_norm(x, own["norm_attention_D"]) @ own["query_key_value_CD"].T
        parts = [part.split(width // heads, dim=-1) for part in projected.split(width, dim=-1)]
        mixed = [
            reference_attention(reference_rotation(q), reference_rotation(k), v)
            for q, k, v in zip(*parts, strict=True)
        ]
        x = x + torch.cat(mixed, dim=-1) @ own["out_DD"].T
        normed = reference_norm(x, own["norm_feed_forward_D"])
        gate, up = (normed @ own["gate_up_2FD"].T).tensor_split(2, dim=-1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ own["down_DF"].T
    return reference_norm(x, parameters["norm_D"]) @ parameters["embedding_VD"].T


def randomise(model, seed=3):
    """Parameters of size one, so that no term is too small to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) + (parameter.dim() == 1))


@pytest.mark.parametrize(("layers", "width", "heads"), SHAPES)
def test_logits_and_gradients_equal_the_reference(layers, width, heads):
    model = make_model(layers, width, heads).double()
    randomise(model)
    model.cos_TJ, model.sin_TJ = exact_tables(9, width // heads)
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([reference_logits(model, row) for row in tokens])
    actual = model(tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn(
        actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    wanted = torch.autograd.grad((expected * direction).sum(), list(model.parameters()))
    got = torch.autograd.grad((actual * direction).sum(), list(model.parameters()))
    for (name, _), left, right in zip(model.named_parameters(), got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-8, msg=name)


def test_rotary_tables_are_exact_to_float32():
    for table, exact in zip(rotary_tables(50, 12), exact_tables(50, 12), strict=True):
        torch.testing.assert_close(table, exact.float(), rtol=0, atol=1e-7)


def test_operators_pass_a_numerical_gradient_check():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, epsilon=1e-6), (x, weight))
    qkv = torch.randn(2, 5, 24, dtype=torch.float64, generator=generator, requires_grad=True)
    tables = exact_tables(5, 4)
    assert torch.autograd.gradcheck(lambda a: split_rotated_heads(a, *tables, heads=2), (qkv,))


def test_rms_norm_equals_the_one_of_torch_and_keeps_a_row_of_zeros_finite():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 16, generator=generator), torch.randn(16, generator=generator)
    torch.testing.assert_close(
        rms_norm(x, weight, epsilon=1e-6), F.rms_norm(x, (16,), weight, 1e-6)
    )
    zeros = torch.zeros(2, 16, requires_grad=True)
    y = rms_norm(zeros, weight, epsilon=1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 16))
    torch.testing.assert_close(zeros.grad, (weight * 1e3).expand(2, 16))  # slope 1 / sqrt(epsilon)


def test_a_later_token_changes_no_earlier_logit():
    model = make_model(3, 16, 2)
    randomise(model)
    tokens = torch.randint(0, 11, (1, 9), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    for position in range(9):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 11
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.allclose(after[:, position], before[:, position])


def test_rotary_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(3, 8, dtype=torch.float64, generator=generator).flatten()
    qkv = content.expand(1, 12, 24)  # the same content at every position
    tables = exact_tables(12, 8)
    q, k, _ = split_rotated_heads(qkv, *tables, heads=1)
    scores = (q @ k.transpose(-1, -2))[0, 0]
    for distance in range(-11, 12):
        diagonal = torch.diagonal(scores, distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert torch.diagonal(scores, 0)[0] != pytest.approx(torch.diagonal(scores, 3)[0].item())
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[..., :1].expand(1, 1, 12))


@pytest.mark.parametrize(("layers", "width", "heads"), SHAPES)
def test_counts_equal_their_closed_forms(layers, width, heads):
    model = make_model(layers, width, heads, vocab=257, length=32)
    hidden = math.ceil(8 * width / 3 / 16) * 16
    matrices = 257 * width + layers * (4 * width**2 + 3 * width * hidden)
    assert model.num_parameters == matrices + width * (2 * layers + 1)


def test_the_seed_alone_decides_the_parameters():
    torch.manual_seed(1)
    first = make_model(seed=5)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = make_model(seed=5)
    assert not torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    other = make_model(seed=6)
    assert not torch.equal(first.embedding_VD, other.embedding_VD)


def test_making_a_model_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    make_model()
    assert torch.equal(before, torch.random.get_rng_state())


def test_initial_sizes_and_loss():
    model = make_model(8, 64, 4, vocab=257, length=32)
    inner = math.sqrt(2 / (5 * 64))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("out_DD", "down_DF"))
            assert parameter.std().item() == pytest.approx(inner / (4 if residual else 1), rel=0.06)
    tokens = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))
    assert model.loss(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(257), abs=0.4)


def test_loss_is_the_mean_negative_log_likelihood():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    pairs = itertools.product(range(2), range(3))
    chosen = [logits[b, t, targets[b, t]] - logits[b, t].exp().sum().log() for b, t in pairs]
    assert token_loss(logits, targets).item() == pytest.approx(-sum(chosen).item() / 6, rel=1e-6)
    assert token_loss(logits.bfloat16(), targets).dtype == torch.float32


def test_every_parameter_gets_a_gradient_and_no_buffer_is_saved():
    model = make_model()
    tokens = torch.arange(9).view(1, 9)
    model.loss(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_overfits_one_small_batch():
    model = make_model(2, 32, 2, vocab=16, length=16)
    tokens = torch.randint(0, 16, (2, 17), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(120):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05  # ln 16 is 2.77


def test_bfloat16_autocast_stays_near_float32():
    model = make_model(2, 32, 2)
    tokens = torch.arange(9).view(1, 9)
    exact = model.loss(tokens, tokens.roll(-1, 1))
    gradients = torch.autograd.grad(exact, list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.loss(tokens, tokens.roll(-1, 1))
    rough_gradients = torch.autograd.grad(rough, list(model.parameters()))
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=1e-2)
    for left, right in zip(gradients, rough_gradients, strict=True):
        assert right.dtype == torch.float32
        assert torch.linalg.vector_norm(left - right) < 0.05 * torch.linalg.vector_norm(left)


def test_too_long_a_sequence_is_an_error_that_names_both_lengths():
    with pytest.raises(ConfigurationError, match="at most 9 tokens; got 10"):
        make_model()(torch.zeros(1, 10, dtype=torch.int64))


def test_shorter_sequences_give_the_same_logits():
    model = make_model()
    tokens = torch.arange(9).view(1, 9)
    torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])
