"""What the GPU benchmark of the mixture of experts is made of."""
