"""What the parts of a predicted iteration are called."""

PARTS = {
    "compute_s": "compute", "recompute_s": "recomputation", "tensor_s": "tensor communication",
    "context_s": "context communication", "expert_s": "dispatch, combine",
    "pipeline_p2p_s": "pipeline p2p", "pipeline_bubble_s": "pipeline bubble",
    "data_s": "gradients, parameters", "offload_s": "host transfers",
    "optimizer_s": "optimizer", "overhead_s": "overhead, lag",
}  # fmt: skip
