"""The symmetric collective between GPUs: bits and graphs, on as many GPUs as there are."""

import comm_oracle
import fabric_ranks
import pytest
import torch

from tokenweave.comm import launch

pytestmark = pytest.mark.multigpu
COUNTS = [0, 1, 2, 3, 13, 128, 577, 8192]


def on_ranks(function, *args):
    return launch(function, torch.cuda.device_count(), device="cuda", args=args)


@pytest.mark.parametrize("hidden", [64, 576, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_is_the_oracles_on_every_rank(dtype: torch.dtype, hidden: int) -> None:
    weight = torch.rand(hidden) + 0.5
    ranks = on_ranks(fabric_ranks.fused, hidden, dtype, COUNTS, weight)
    for which, tokens in enumerate(COUNTS):
        partials, residual = fabric_ranks.inputs(tokens, hidden, dtype, len(ranks))
        stored, normed = comm_oracle.fused(partials, residual, weight, 1e-5)
        for rank, results in enumerate(ranks):
            own_rows, rows = results[which]
            assert torch.equal(own_rows, stored[comm_oracle.rows(tokens, len(ranks), rank)])
            torch.testing.assert_close(rows, normed, rtol=comm_oracle.tolerance(dtype), atol=1e-6)
            assert torch.equal(rows, ranks[0][which][1])


def test_2000_replays_of_two_lanes_with_ranks_late_at_random() -> None:
    for same in on_ranks(fabric_ranks.replays, 4096, [1, 3, 64, 577, 2048], 2000):
        assert len(same) == 40 and all(same)
