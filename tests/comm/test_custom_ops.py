"""The operations as torch operators: right, honest about what they change, and traced by torch.compile."""

import comm_oracle as oracle
import pytest
import torch

from tokenweave.comm import Group, launch

EPS = 1e-5


def operators(group: Group) -> list[str]:
    from tokenweave.comm import custom_ops

    wrong = []
    ops = torch.ops.tokenweave
    generator = torch.Generator().manual_seed(3)
    with group.open_collective(64, 13, lanes=2) as collective:
        name = custom_ops.expose(collective)
        for tokens in (1, 13):
            partials = list(torch.randn(group.size, tokens, 64, generator=generator))
            residual, weight = torch.randn(tokens, 64, generator=generator), torch.randn(64, generator=generator)
            mine = group.rows(tokens)
            y, x = oracle.fused(partials, residual, weight, EPS)
            total = oracle.total(partials)

            def step(partial: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                ops.all_reduce_add_rms_norm(partial, rows, weight, EPS, name, 1)
                return partial * 2

            for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
                for inside in (True, False):
                    partial = partials[group.rank].clone()
                    if inside:
                        partial = collective.buffer(1, tokens).copy_(partial)
                    rows = residual[mine].clone()
                    twice = run(partial, rows)
                    if not (torch.allclose(partial, x, atol=1e-5) and torch.allclose(twice, 2 * x, atol=1e-5)):
                        wrong.append(f"{tokens} tokens, inside {inside}: normed rows")
                    if not torch.equal(rows, y[mine]):
                        wrong.append(f"{tokens} tokens, inside {inside}: residual")
            if not torch.equal(ops.all_reduce(partials[group.rank], name), total):
                wrong.append("all_reduce")
            scattered = ops.reduce_scatter(partials[group.rank], name)
            if not torch.equal(scattered, total[mine]):
                wrong.append("reduce_scatter")
            if not torch.equal(ops.all_gather(scattered, tokens, name), total):
                wrong.append("all_gather")
        rows = residual[mine].clone()
        for operator, arguments in (
            (ops.all_reduce_add_rms_norm, (partials[group.rank].clone(), rows, weight, EPS, name)),
            (ops.all_reduce, (partials[group.rank], name)),
            (ops.reduce_scatter, (partials[group.rank], name)),
            (ops.all_gather, (rows, 13, name)),
        ):
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(operator.default, arguments, test_utils=tests)
    return wrong


@pytest.mark.parametrize("size", (1, 2))
def test_operators(size: int) -> None:
    assert launch(operators, size) == [[]] * size


def test_a_name_that_nobody_has() -> None:
    from tokenweave.comm import custom_ops  # noqa: F401, registers the operators

    with pytest.raises(ValueError, match="'none of these'"):
        torch.ops.tokenweave.all_reduce(torch.zeros(1, 8), "none of these")
