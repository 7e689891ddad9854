"""PyTorch operators with Triton kernels behind them. `kernel_limits` does not import torch."""
