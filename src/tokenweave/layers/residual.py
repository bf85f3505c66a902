"""Add to the residual, then RMSNorm, on rows that one rank holds whole."""

import torch

from tokenweave.comm import local
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.paths import uses_gpu_kernels


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """y = rows + residual rounded to the dtype and stored as the residual; rows become norm(y). Returns rows.

    rows, residual: [n, hidden], both written in place.
    """
    if rows.is_cpu:
        return local.add_rms_norm(rows, residual, norm.weight, norm.eps)
    if uses_gpu_kernels(rows):
        from tokenweave.layers import cuda

        return cuda.add_rms_norm(rows, residual, norm.weight, norm.eps)
    residual.copy_(rows.float().add_(residual))
    return rows.copy_(norm(residual))
