"""torchtitan's own entry point on processors: ``torchtitan_on_cpu.py --module M --config C``.

It is written for accelerators. What it asks of one is answered here, before it is imported;
attention is PyTorch's own, for FlexAttention has no backward on processors; "Adam" is plain
gradient descent, under which a mean of parameters after each step is a mean of gradients.
"""

import os
import types

import torch
import torch.cpu

_ANSWERS = {
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=2**34),
    "set_device": lambda *_: None,
    "device_count": lambda: 1,
}


class Plain(torch.optim.SGD):
    def __init__(self, parameters, *, lr=0.1, **_):
        super().__init__(parameters, lr=lr)


def prepare():
    """Answer for an accelerator; to be called before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in _ANSWERS.items():
        setattr(torch.cpu, name, answer)
    torch.optim.Adam = Plain
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import utils
    from torchtitan.models.common import attention, config_utils

    utils.set_pg_timeouts = lambda *_, **__: None  # its barrier names a device
    divide = FSDPModule.set_gradient_divide_factor

    def divide_then_sum(module, factor):
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_then_sum
    sdpa = attention.ScaledDotProductAttention.Config
    config_utils.get_attention_config = lambda *_: sdpa()


def base():
    """The debug model, on the text and the tokenizer of the test."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.mixed_precision_param = "float32"
    config.training.max_norm = 1e9  # a norm of all gradients and norms of parts clip differently
    config.activation_checkpoint = None
    config.parallelism.data_parallel_replicate_degree = 2
    # Its default has no DTensors on processors (torch 2.13 and torchtitan 0.3.0).
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.checkpoint.enable = True
    config.optimizer.implementation = "foreach"
    if os.environ.get("OPTIMIZER") == "plain":
        group = ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 0.1})
        config.optimizer = OptimizersContainer.Config(
            param_groups=[group], implementation="foreach"
        )
    return config


def outer():
    """It, with the rule that the environment names."""
    from fivefold import optim
    from fivefold.optim.integrations import torchtitan_outer_sync

    return torchtitan_outer_sync(base(), eval(os.environ["RULE"], vars(optim)))  # noqa: S307 - the test's


if __name__ == "__main__":
    prepare()
    from torchtitan.train import main

    main()
