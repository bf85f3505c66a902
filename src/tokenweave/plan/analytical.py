"""Costs calculated from a model's dimensions and facts about the hardware."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from tokenweave.config import ModelConfig, Shard, shard
from tokenweave.plan.hardware import Hardware, Tile
from tokenweave.plan.shape import Load

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Matmul:
    """[tokens, inner] x [inner, columns] on one rank; or one of `experts` such, of which each token has `per_token`."""

    name: str
    inner: int
    columns: int
    experts: int = 1
    per_token: int = 1

    def groups(self, tokens: int) -> tuple[int, int]:
        """How many of the experts' matrices that many tokens need, routed evenly, and the rows of each."""
        if self.experts == 1:
            return 1, tokens
        expected = self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)
        used = max(1, ceil(expected - 1e-9))
        return used, ceil(tokens * self.per_token / used)


@dataclass(frozen=True)
class Waves:
    """How a matmul fills a GPU: `tiles` tiles in `waves` rounds over the processors."""

    tile: Tile
    tiles: int
    waves: int


@dataclass(frozen=True)
class Parts:
    """Seconds of one stage by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise


@dataclass(frozen=True)
class AnalyticalCosts:
    """The `Costs` of `config` on `size` ranks of `hardware`: each stage is as slow as its heaviest rank."""

    config: ModelConfig
    hardware: Hardware
    size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        shard(self.config, self.size, 0)  # refuses an impossible tensor parallel size

    @cached_property
    def shards(self) -> list[Shard]:
        return [shard(self.config, self.size, rank) for rank in range(self.size)]

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def contention(self) -> float:
        return self.hardware.contention

    @property
    def budgets(self) -> tuple[int | None, ...]:
        return tuple(b for b in self.hardware.budgets if b < self.hardware.processors) or (None,)

    @property
    def grain(self) -> int:
        return self.hardware.tiles[0].rows

    @cached_property
    def matmuls(self) -> dict[str, tuple[Matmul, ...]]:
        """The matmuls of a layer's stages, of the heaviest rank; "mlp" is of the kind that most layers have."""
        config = self.config
        heads = max(part.num_query_heads for part in self.shards) * config.head_dim
        kv = max(part.num_kv_heads for part in self.shards) * config.head_dim
        hidden = config.hidden_size
        return {
            "attention": (Matmul("qkv", hidden, heads + 2 * kv), Matmul("output", heads, hidden)),
            "mlp": max(self._mlps, key=lambda kind: kind[0])[1],
        }

    @cached_property
    def _mlps(self) -> tuple[tuple[float, tuple[Matmul, ...]], ...]:
        """The share of layers that have an MLP, and that have experts, with the matmuls of either."""
        config, experts = self.config, self.config.experts
        hidden, wide = config.hidden_size, 2 if config.gated_mlp else 1
        sparse = sum(experts.layers) / config.num_hidden_layers if experts else 0.0
        columns = max(part.mlp_columns.stop - part.mlp_columns.start for part in self.shards)
        kinds: list[tuple[float, tuple[Matmul, ...]]]
        kinds = [(1 - sparse, (Matmul("gate_up", hidden, wide * columns), Matmul("down", columns, hidden)))]
        if experts:
            columns = max(part.expert_columns.stop - part.expert_columns.start for part in self.shards)
            count, per_token = experts.count, experts.per_token
            up = Matmul("gate_up", hidden, wide * columns, count, per_token)
            down = Matmul("down", columns, hidden, count, per_token)
            kinds.append((sparse, (Matmul("router", hidden, count), up, down)))
        return tuple(kind for kind in kinds if kind[0])

    @cached_property
    def _windows(self) -> tuple[tuple[float, int | None], ...]:
        """The share of layers that attend to so many keys at most."""
        windows = [self.config.window(layer) for layer in range(self.layers)]
        return tuple((windows.count(window) / self.layers, window) for window in set(windows))

    def waves(self, matmul: Matmul, tokens: int, taken: int = 0) -> Waves:
        """Tiles and waves on the processors that are left. The tile is the one that is fastest on all of them: a
        library does not know that a collective took some.
        """
        key = matmul.columns, *matmul.groups(tokens)
        if key not in self._tiles:
            self._tiles[key] = self._fastest_tile(*key)
        tile, tiles = self._tiles[key]
        return Waves(tile, tiles, ceil(tiles / (self.hardware.processors - taken)))

    def parts(self, stage: str, load: Load, taken: int = 0) -> Parts:
        """One stage's seconds, taken apart."""
        tokens = load.tokens
        if not tokens:
            return Parts()
        if stage == "embed":
            return Parts(elementwise=self._moved(2 * tokens * self.config.hidden_size))
        if stage == "mlp":
            kinds = [(share, self._mlp(matmuls, tokens, taken)) for share, matmuls in self._mlps]
            return Parts(
                matmul=sum(share * part.matmul for share, part in kinds),
                elementwise=sum(share * part.elementwise for share, part in kinds),
            )
        qkv, output = self.matmuls["attention"]
        attention = sum(share * self._attention(load, window, taken) for share, window in self._windows)
        return Parts(
            matmul=self._matmul(qkv, tokens, taken) + self._matmul(output, tokens, taken),
            attention=attention,
            elementwise=self._moved(2 * tokens * qkv.columns),
        )

    def _mlp(self, matmuls: tuple[Matmul, ...], tokens: int, taken: int) -> Parts:
        down = matmuls[-1]
        moved = 3 * tokens * down.per_token * down.inner
        if down.experts > 1:  # rows are gathered for their experts, and their results weighted and added
            moved += 4 * tokens * down.per_token * self.config.hidden_size
        return Parts(matmul=sum(self._matmul(m, tokens, taken) for m in matmuls), elementwise=self._moved(moved))

    def _attention(self, load: Load, window: int | None, taken: int) -> float:
        """Seconds besides the projections. window: the keys that a token attends to at most."""
        hardware = self.hardware
        qkv, output = self.matmuls["attention"]
        kv = (qkv.columns - output.inner) // 2
        pairs, keys = load.pairs, load.keys
        if window is not None:
            pairs = min(pairs, load.tokens * window)
            keys = min(keys, load.tokens + (load.rows + 1) * window)  # of all requests, one of which may go on
        left = hardware.processors / (hardware.processors - taken)
        arithmetic = 4 * output.inner * pairs / (self._peak() * hardware.attention_efficiency) * left
        memory = (2 * kv * keys + 2 * output.inner * load.tokens) * self.bytes / self._memory_rate()
        return max(arithmetic, memory) + hardware.launch_seconds

    def compute(self, stage: str, load: Load, taken: int = 0) -> float:
        return self.parts(stage, load, taken).total

    def head(self, rows: int) -> float:
        if not rows:
            return 0.0
        columns = max(part.vocab_rows.stop - part.vocab_rows.start for part in self.shards)
        return self._matmul(Matmul("head", self.config.hidden_size, columns), rows, 0)

    def norm(self, tokens: int) -> float:
        return self._moved(4 * tokens * self.config.hidden_size) if tokens else 0.0

    def all_reduce(self, tokens: int) -> float:
        return self._linked(tokens, self._all_reduce_passes(), None)

    def reordered(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        passes = 1.0 if self.hardware.multicast else (self.size - 1) / self.size
        own = -(-tokens // self.size)
        return 2 * self._linked(tokens, passes, None) + self.norm(own)

    def fused(self, tokens: int, budget: int | None) -> float:
        return self._linked(tokens, self._all_reduce_passes(), budget)

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def _all_reduce_passes(self) -> float:
        """Bytes that cross the busier direction of a rank's link, as a multiple of the message. With multicast the
        switch fetches every row once for its owner's sum and the owner's result goes back once: 1 + 1/N. Without, a
        rank reads (N - 1)/N of the message to sum and (N - 1)/N to gather.
        """
        return 1 + 1 / self.size if self.hardware.multicast else 2 * (self.size - 1) / self.size

    def _linked(self, tokens: int, passes: float, budget: int | None) -> float:
        """A collective of [tokens, hidden] on one rank of several."""
        if not tokens or self.size == 1:
            return 0.0
        hardware = self.hardware
        rate = hardware.link_bandwidth * hardware.link_efficiency
        if budget is not None:
            rate = min(rate, budget * hardware.processor_link_bandwidth)
        return hardware.link_latency + passes * tokens * self.config.hidden_size * self.bytes / rate

    @cached_property
    def _tiles(self) -> dict[tuple[int, int, int], tuple[Tile, int]]:
        """Tile and number of tiles by columns, matrices and rows of each: a planner asks for them at every step."""
        return {}

    def _fastest_tile(self, columns: int, groups: int, rows: int) -> tuple[Tile, int]:
        def tiles(tile: Tile) -> int:
            return groups * ceil(rows / tile.rows) * ceil(columns / tile.columns)

        def work(tile: Tile) -> float:
            return ceil(tiles(tile) / self.hardware.processors) * tile.rows * tile.columns / tile.share

        best = min(self.hardware.tiles, key=work)
        return best, tiles(best)

    def _matmul(self, matmul: Matmul, tokens: int, taken: int) -> float:
        """Waves of tiles, or the reading of weights and activations where that takes longer."""
        chosen = self.waves(matmul, tokens, taken)
        rate = self._peak() * self.hardware.matmul_efficiency * chosen.tile.share
        area = chosen.tile.rows * chosen.tile.columns
        flops = 2 * area * matmul.inner * chosen.waves * self.hardware.processors
        groups, rows = matmul.groups(tokens)
        moved = groups * (matmul.inner * matmul.columns + rows * (matmul.inner + matmul.columns))
        return max(flops / rate, moved * self.bytes / self._memory_rate()) + self.hardware.launch_seconds

    def _moved(self, numbers: int) -> float:
        """An operation that is bound by memory."""
        return numbers * self.bytes / self._memory_rate() + self.hardware.launch_seconds

    def _peak(self) -> float:
        return self.hardware.peak_flops * (1 if self.bytes == 2 else 0.5)  # tf32 runs at half the rate of bf16

    def _memory_rate(self) -> float:
        return self.hardware.memory_bandwidth * self.hardware.memory_efficiency
