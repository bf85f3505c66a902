"""The fused operation as vLLM's stock forward meets it: an RMSNorm whose input is a partial sum."""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils.torch_utils import direct_register_custom_op

from tokenweave.integrations.vllm.runtime import KEY, Norm


class ReducingRMSNorm(RMSNorm):
    """Takes the place of a norm behind a row-parallel layer that no longer reduces.

    forward(partial [tokens, hidden], residual) -> (normed rows, residual), as the stock class does of the ranks' sum.
    The residual has the shape of the partial, but only this rank's rows of it are kept up to date: the next norm reads
    no others. Without a residual it is the stock norm: the first of a model, behind the embedding.
    """

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return super().forward(x)
        normed = torch.ops.vllm.tokenweave_all_reduce_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return normed, residual


def all_reduce_add_rms_norm(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual, of which this rank's rows count, += sum over the ranks of partial; returns its norm, [tokens, hidden].

    The result is copied out of the communication buffer: a compiler that is given the buffer may put another tensor of
    the same size there once it is read, which the next operation would overwrite.
    """
    runtime = get_forward_context().no_compile_layers[KEY]
    return runtime.reduce(partial.contiguous(), residual, Norm(weight, eps)).clone()


def _shape(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(partial)


direct_register_custom_op(
    op_name="tokenweave_all_reduce_add_rms_norm",
    op_func=all_reduce_add_rms_norm,
    mutates_args=["residual"],
    fake_impl=_shape,
)
