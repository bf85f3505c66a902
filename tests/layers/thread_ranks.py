"""Ranks as threads of one process, in any dtype: for gradcheck, which needs float64 and one function of all inputs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class ThreadGroup:
    """What all ranks share: a place for each rank's tensor, and a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size

    def run(self, fn: Callable[..., Any], per_rank: Sequence[Any]) -> list[Any]:
        """fn(collective, item) on every rank at once."""
        with ThreadPoolExecutor(self.size) as pool:
            jobs = [pool.submit(self._guarded, fn, rank, item) for rank, item in enumerate(per_rank)]
            return [job.result() for job in jobs]

    def _guarded(self, fn: Callable[..., Any], rank: int, item: Any) -> Any:
        try:
            return fn(ThreadCollective(self, rank), item)
        except BaseException:
            self.barrier.abort()
            raise


class ThreadCollective:
    """all_reduce, reduce_scatter and all_gather as `Collective` defines them; results lie in memory that lives on."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def _meet(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.group.slots[self.rank] = tensor.detach().clone()
        self.group.barrier.wait()
        slots = list(self.group.slots)
        self.group.barrier.wait()
        return slots

    def _own(self, tokens: int) -> slice:
        size = self.group.size
        return slice(self.rank * tokens // size, (self.rank + 1) * tokens // size)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet(partial)).sum(0)

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(partial)[self._own(partial.shape[0])].clone()

    def all_gather(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        gathered = torch.cat(self._meet(rows))
        assert gathered.shape[0] == tokens
        return gathered


def as_one(
    group: ThreadGroup, fn: Callable[[ThreadCollective, torch.Tensor], torch.Tensor], *, shared_input: bool, alike: bool
) -> Callable[..., Any]:
    """fn of each rank's tensor as one function of all of them, forward and backward, for gradcheck.

    shared_input: all ranks get the one tensor; each then has its whole gradient. alike: all ranks return the same,
    which is returned once; its gradient goes to every rank.
    """

    class AllRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            given = list(inputs) * (group.size if shared_input else 1)
            found = group.run(lambda c, x: fn(c, x.clone()).detach(), given)
            if alike:
                assert all(torch.equal(found[0], other) for other in found)
                return found[0]
            return tuple(found)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            given = list(ctx.saved_tensors) * (group.size if shared_input else 1)

            def one(collective: ThreadCollective, x: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    leaf = x.detach().clone().requires_grad_()
                    y = fn(collective, leaf * 1)
                    y.backward(grads[0] if alike else grads[collective.rank])
                assert leaf.grad is not None
                return leaf.grad

            found = group.run(one, given)
            if shared_input:
                assert all(torch.equal(found[0], other) for other in found)
                return found[0]
            return tuple(found)

    return AllRanks.apply
