"""What an emulated rank is held back to: times published for 8 H100s on NVSwitch."""

from collections.abc import Callable

from tokenweave.comm.emulated import Emulation
from tokenweave.plan.curves import Curve
from tokenweave.plan.published import BUDGETS, COLLECTIVE_HIDDEN, COLLECTIVE_TP, figures

LINK_BANDWIDTH = 450e9  # bytes/s one way, NVLink 4
_PUBLISHED_BYTES = 2 * COLLECTIVE_HIDDEN  # of a row


def published_emulation(
    *, size: int, hidden_size: int, dtype_bytes: int = 2, traffic: str = "multicast", slower: float = 1.0
) -> Emulation:
    """Rank 0 of `size` ranks, paced by the published figures.

    "multicast": the published fused operation by tokens and thread blocks, and the collectives that use multicast.
    "p2p": the larger of that and the bytes that cross the link one way, and NCCL's collectives. Rows of another size
    take the time of as many bytes. slower: factor on every time.
    Raises ValueError for sizes other than 8: of no other are the times published.
    """
    if size != COLLECTIVE_TP:
        raise ValueError(f"times are published for {COLLECTIVE_TP} ranks, got {size}")
    row_bytes = hidden_size * dtype_bytes
    library = "nccl" if traffic == "p2p" else "multimem"
    # Partials of this rank's rows come in from every other rank, and their rows of the result.
    crossing = 2 * (size - 1) / size * row_bytes if traffic == "p2p" else 0.0

    def pace(system: str) -> Callable[[float], float]:
        return ScaledCurve(Curve.of(figures()["-", COLLECTIVE_TP, system]), row_bytes / _PUBLISHED_BYTES, slower)

    return Emulation(
        size=size,
        traffic=traffic,
        fused={budget: pace(f"fused_ctas_{budget}") for budget in BUDGETS},
        all_reduce=pace(f"{library}_all_reduce"),
        reduce_scatter=pace(f"{library}_reduce_scatter"),
        all_gather=pace(f"{library}_all_gather"),
        link_seconds=slower * crossing / LINK_BANDWIDTH,
    )


class ScaledCurve:
    """A curve over published tokens, for rows that are `bytes` times as large."""

    def __init__(self, curve: Curve, bytes: float, slower: float) -> None:
        self.curve, self.bytes, self.slower = curve, bytes, slower

    def __call__(self, tokens: float) -> float:
        return self.slower * self.curve(tokens * self.bytes)
