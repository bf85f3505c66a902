"""Facts about devices, and what of them a kernel reaches."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a matmul tile, and the share of the best tile's rate that it reaches: a smaller tile reads
    its operands more often."""

    rows: int
    columns: int
    share: float = 1.0


GPU_TILES = (
    Tile(128, 256), Tile(256, 128), Tile(128, 192, 0.95), Tile(128, 128, 0.88), Tile(64, 256, 0.85),
    Tile(64, 128, 0.7), Tile(64, 64, 0.5),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU and its link to its peers: figures of the data sheet, then the shares of them that kernels reach.

    Bandwidths are bytes/s; the link's is one way. peak_flops: dense bf16 or fp16. processors: SMs.
    multicast: the switch adds and copies (NVSwitch of Hopper and later). source: where the figures stand.
    The shares were set by the published no-communication latencies and collective times of `plan/data` (8 x H100).
    """

    name: str
    processors: int
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    multicast: bool
    source: str = ""
    device_names: tuple[str, ...] = ()
    matmul_efficiency: float = 0.65  # of peak, for a full wave of the largest tiles
    attention_efficiency: float = 0.60  # of peak, causal, head_dim 128
    memory_efficiency: float = 0.87  # the published add + RMSNorm moves 2.9 of 3.35 TB/s
    link_efficiency: float = 0.69  # the published multicast all-reduce moves 310 of 450 GB/s
    link_latency: float = 14e-6  # one collective of a few tokens
    processor_link_bandwidth: float = 40e9  # one SM of the fused kernel: 35 to 48 GB/s published for 8 to 2 of them
    launch_seconds: float = 2e-6  # between two kernels of a replayed graph
    contention: float = 0.046  # fitted: plan.published.fit
    tiles: tuple[Tile, ...] = GPU_TILES
    budgets: tuple[int, ...] = (2, 4, 8, 16)  # processors that the fused kernel is tried on; none: it has no choice

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
                raise ValueError(f"{field.name} of hardware {self.name} must not be negative, got {value}")
        if self.processors < 1:
            raise ValueError(f"hardware {self.name} needs at least one processor")

    def with_link(self, *, latency: float, bandwidth: float) -> "Hardware":
        """The same device on a link that was measured: seconds of a tiny collective, bytes/s reached one way."""
        return dataclasses.replace(self, link_latency=latency, link_bandwidth=bandwidth, link_efficiency=1.0)


def cpu(threads: int, *, shared_memory: bool) -> Hardware:
    """A rank of `threads` cores of some server CPU, for a plan before anything was measured there.

    Over shared memory the core that communicates is a core that computes, so weaving hides nothing.
    """
    return Hardware(
        name="cpu",
        processors=threads,
        peak_flops=200e9 * threads,  # twice float32's: 100 GFLOP/s a core with 512-bit or two 256-bit FMA units
        memory_bandwidth=12e9 * threads,
        memory_bytes=0.0,
        link_bandwidth=6e9 if shared_memory else 1.25e9,
        multicast=False,
        link_efficiency=1.0,
        link_latency=5e-6 if shared_memory else 200e-6,
        launch_seconds=5e-6,
        contention=1e6 if shared_memory else 0.2,
        tiles=(Tile(16, 32),),
        budgets=(),
        source="an allowance; `tokenweave tune` measures",
    )


@cache
def catalogue() -> dict[str, Hardware]:
    """Known hardware by its short name."""
    text = resources.files("tokenweave.plan").joinpath("data/hardware.json").read_text(encoding="utf-8")
    facts = json.loads(text)
    for fact in facts.values():
        fact["device_names"] = tuple(fact["device_names"])
    return {name: Hardware(name=name, **fact) for name, fact in facts.items()}


def hardware(name: str) -> Hardware:
    """Hardware by short name ("h100") or by the device name that CUDA gives it. Raises ValueError if unknown."""
    for entry in catalogue().values():
        if name.lower() == entry.name or name in entry.device_names:
            return entry
    raise ValueError(f"hardware {name!r} is not known; known: {', '.join(catalogue())}")
