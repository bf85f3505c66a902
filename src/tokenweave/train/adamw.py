"""AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with float32 state for weights of any type."""

from collections.abc import Sequence

import torch
from torch import nn

from tokenweave.train.config import TrainingConfig
from tokenweave.train.pieces import in_pieces


class AdamW:
    """masters: float32 weights, the parameters themselves where they are float32 already, else copies that the
    parameters are rounded from. first, second: the moments. Weight decay is of matrices: norms and biases have none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: TrainingConfig) -> None:
        self.parameters, self.config = list(parameters), config
        self.masters = [p.data if p.dtype == torch.float32 else p.data.float() for p in self.parameters]
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], step: int, *, learning_rate: float, scale: float) -> None:
        """Step 0, 1, ... with gradients times `scale`."""
        config = self.config
        unbias1, unbias2 = 1 - config.beta1 ** (step + 1), 1 - config.beta2 ** (step + 1)
        for index, gradient in enumerate(gradients):
            master, decays = self.masters[index], self.masters[index].dim() > 1
            whole = (gradient, master, self.first[index], self.second[index])
            for grad, weight, first, second in zip(*map(in_pieces, whole), strict=True):
                scaled = grad.float() * scale
                first.lerp_(scaled, 1 - config.beta1)
                second.mul_(config.beta2).addcmul_(scaled, scaled, value=1 - config.beta2)
                if decays:
                    weight.mul_(1 - learning_rate * config.weight_decay)
                denominator = torch.sqrt(second, out=scaled).div_(unbias2**0.5).add_(config.epsilon)
                weight.addcdiv_(first, denominator, value=-learning_rate / unbias1)
            self.publish(index)

    def adopt(self) -> None:
        """Take the parameters' values for masters, after they were filled from elsewhere."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.copy_(parameter.data)

    def publish(self, index: int) -> None:
        """Round a master to its parameter."""
        parameter, master = self.parameters[index], self.masters[index]
        if parameter.data_ptr() != master.data_ptr():
            parameter.data.copy_(master)
