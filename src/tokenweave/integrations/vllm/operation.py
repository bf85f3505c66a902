"""The fused operation as vLLM's stock forward meets it: an RMSNorm whose input is a partial sum."""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils.torch_utils import direct_register_custom_op

from tokenweave.integrations.vllm.runtime import KEY, Norm

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class ReducingRMSNorm(RMSNorm):
    """Takes the place of a norm behind a row-parallel layer that no longer reduces, in a model that is compiled.

    forward(partial [tokens, hidden], residual) -> (normed rows, residual), as the stock class does of the ranks' sum.
    The residual has the shape of the partial, but only this rank's rows of it are kept up to date: the next norm reads
    no others. Without a residual it is the stock norm: the first of a model, behind the embedding.

    The rows are copied from the communication buffer to where the partial was. A compiler that is given the buffer puts
    another tensor of the same size there once the rows are read, and the next operation would overwrite that.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return super().forward(x)
        torch.ops.vllm.tokenweave_all_reduce_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return x, residual


class EagerReducingRMSNorm(RMSNorm):
    """The same in a model that is not compiled. The rows stay in the communication buffer, until the next norm: what
    comes between reads them and writes elsewhere."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return super().forward(x)
        return _reduced(x, residual, self.weight, self.variance_epsilon), residual


class EagerLastRMSNorm(EagerReducingRMSNorm):
    """The last of a model, whose rows somebody may keep."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        assert residual is not None
        return _reduced(x, residual, self.weight, self.variance_epsilon).clone(), residual


def all_reduce_add_rms_norm(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual, of which this rank's rows count, += sum over the ranks of partial; partial = its norm."""
    partial.copy_(_reduced(partial, residual, weight, eps))


def _reduced(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    runtime = get_forward_context().no_compile_layers[KEY]
    return runtime.reduce(partial.contiguous(), residual, Norm(weight, eps))


def _nothing(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """What it gives in a trace without data."""


direct_register_custom_op(
    op_name="tokenweave_all_reduce_add_rms_norm",
    op_func=all_reduce_add_rms_norm,
    mutates_args=["partial", "residual"],
    fake_impl=_nothing,
)
