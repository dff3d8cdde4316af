"""A mixture-of-experts layer: train it, keep its experts evenly loaded, export its weights.

python examples/moe_layer.py
"""

from __future__ import annotations

import torch

from fivefold.moe import MoE, MoEConfig, Router, export_checkpoint, updated_selection_bias

STEPS = 300


def main() -> None:
    """Fit a function that differs from region to region, one region per expert at best."""
    torch.manual_seed(0)
    router = Router(top_k=2, score="sigmoid")
    layer = MoE(
        MoEConfig(hidden=16, intermediate=32, experts=8, router=router, selection_bias=True)
    )
    centres = torch.randn(8, 16)
    targets = torch.randn(8, 16, 16) / 4.0
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    for step in range(STEPS):
        region = torch.randint(8, (512,))
        x = centres[region] + 0.3 * torch.randn(512, 16)
        wanted = torch.einsum("thd,td->th", targets[region], x)
        loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert layer.last_routing is not None, "the forward above has routed"
        load = layer.last_routing.load_E
        bias = layer.gate.selection_bias
        assert bias is not None, "the configuration asked for it"
        bias.copy_(updated_selection_bias(bias, load, rate=1e-2))
        if step % 60 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  tokens per expert {load.tolist()}")
    names = export_checkpoint(layer.state_dict(), "deepseek", prefix="model.layers.0.mlp.")
    print(f"loss {loss.item():.4f}; exported {len(names)} tensors, such as {min(names)}")


if __name__ == "__main__":
    main()
