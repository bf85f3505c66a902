"""What the collectives must give, in plain torch; shares no code with them."""

import torch


def total(partials: list[torch.Tensor]) -> torch.Tensor:
    """The partials summed in rank order in float32, not yet rounded to their dtype."""
    result = partials[0].float()
    for partial in partials[1:]:
        result = result + partial.float()
    return result


def fused(partials, residual, weight, eps):
    """(new residual, normed rows), both of all rows."""
    dtype = residual.dtype
    y = (total(partials) + residual.float()).to(dtype)
    variance = y.double().square().mean(-1, keepdim=True)
    scaled = (y.double() * (variance + eps).rsqrt()).to(dtype)
    return y, (weight.double() * scaled.double()).to(dtype)


def rows(count: int, size: int, rank: int) -> slice:
    return slice(rank * count // size, (rank + 1) * count // size)


def tolerance(dtype: torch.dtype) -> float:
    """Relative error allowed to normed rows. The sum of squares goes in another order, so that now and then both
    roundings of an element go the other way: two units in the last place."""
    return {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
