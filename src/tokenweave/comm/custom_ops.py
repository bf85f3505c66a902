"""The collectives' operations as torch operators, for torch.compile and for other engines.

    from tokenweave.comm import custom_ops
    name = custom_ops.expose(collective)
    torch.ops.tokenweave.all_reduce_add_rms_norm(partial, residual, weight, 1e-5, name)

An operator's arguments are tensors and plain values, so the collective goes by a name.
"""

import itertools
import weakref

import torch

from tokenweave.comm.collective import Collective
from tokenweave.config import partition

_exposed: weakref.WeakValueDictionary[str, Collective] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def expose(collective: Collective) -> str:
    """A name for an open collective, good for as long as it lives. It says rank and size, which shapes depend on."""
    name = f"{next(_numbers)}:{collective.rank}/{collective.size}"
    _exposed[name] = collective
    return name


def _find(name: str) -> Collective:
    try:
        return _exposed[name]
    except KeyError:
        raise ValueError(f"no collective is exposed as {name!r}; known: {', '.join(_exposed) or 'none'}") from None


@torch.library.custom_op("tokenweave::all_reduce_add_rms_norm", mutates_args=("partial", "residual"))
def all_reduce_add_rms_norm(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, collective: str, lane: int = 0,
    budget: int = 0,
) -> None:  # fmt: skip
    """See `Collective.all_reduce_add_rms_norm`; partial becomes the normed rows. budget: 0 for the collective's own.

    A partial in the lane's buffer (`Collective.buffer`) is not copied; any other is, in and out.
    """
    rows = _find(collective).all_reduce_add_rms_norm(partial, residual, weight, eps, lane=lane, budget=budget or None)
    if rows.data_ptr() != partial.data_ptr():
        partial.copy_(rows)


@torch.library.custom_op("tokenweave::all_reduce", mutates_args=())
def all_reduce(partial: torch.Tensor, collective: str, lane: int = 0) -> torch.Tensor:
    """See `Collective.all_reduce`; in memory of its own."""
    return _find(collective).all_reduce(partial, lane=lane).clone()


@torch.library.custom_op("tokenweave::reduce_scatter", mutates_args=())
def reduce_scatter(partial: torch.Tensor, collective: str, lane: int = 0) -> torch.Tensor:
    """See `Collective.reduce_scatter`."""
    return _find(collective).reduce_scatter(partial, lane=lane)


@torch.library.custom_op("tokenweave::all_gather", mutates_args=())
def all_gather(rows: torch.Tensor, tokens: int, collective: str, lane: int = 0) -> torch.Tensor:
    """See `Collective.all_gather`; in memory of its own."""
    return _find(collective).all_gather(rows, tokens, lane=lane).clone()


@all_reduce_add_rms_norm.register_fake
def _(partial, residual, weight, eps, collective, lane=0, budget=0):  # type: ignore[no-untyped-def]
    return None


@all_reduce.register_fake
def _(partial, collective, lane=0):  # type: ignore[no-untyped-def]
    return torch.empty_like(partial)


@reduce_scatter.register_fake
def _(partial, collective, lane=0):  # type: ignore[no-untyped-def]
    rank, size = map(int, collective.split(":")[1].split("/"))
    own = partition(partial.shape[0], size, rank)
    return partial.new_empty(own.stop - own.start, partial.shape[1])


@all_gather.register_fake
def _(rows, tokens, collective, lane=0):  # type: ignore[no-untyped-def]
    return rows.new_empty(tokens, rows.shape[1])
