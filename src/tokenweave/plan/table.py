"""Tuned tables: what `tokenweave tune` measured on a device, kept in the user's cache."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from tokenweave.config import ModelConfig
from tokenweave.config.cache import cache_root
from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import MODES, StepPlan

FORMAT = 2
LINK_TOLERANCE = 2.0  # by which fingerprints of one link differ where gloo's threads share cores with the ranks


@dataclass(frozen=True, kw_only=True)
class TuneKey:
    """What measured costs hold for. link_latency (seconds) and link_bandwidth (bytes/s) are a fingerprint taken at
    start and match within LINK_TOLERANCE; the rest matches exactly.

    device: name. processors: SMs or cores. threads: a rank's, 0 on a GPU. model: see model_dimensions.
    """

    device: str
    processors: int
    threads: int
    hosts: int
    model: tuple[int, ...]
    tensor_parallel_size: int
    dtype: str
    collective: str
    version: str
    link_latency: float
    link_bandwidth: float

    def mismatch(self, other: "TuneKey") -> str | None:
        """The first field in which the other key differs, with both values; None where it matches."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name.startswith("link_"):
                same = max(mine, theirs) <= LINK_TOLERANCE * min(mine, theirs)
            else:
                same = mine == theirs
            if not same:
                return f"{field.name} is {theirs} there and {mine} here"
        return None

    def filename(self) -> str:
        """One file for all that match but for the link, so that a changed link is measured over, not beside."""
        exact = {name: value for name, value in dataclasses.asdict(self).items() if not name.startswith("link_")}
        return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def model_dimensions(config: ModelConfig) -> tuple[int, ...]:
    """What of a model its costs depend on."""
    experts, windows = config.experts, [window for window in config.windows if window is not None]
    return (
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.vocab_size, config.gated_mlp, config.qk_norm,
        *((experts.count, experts.per_token, experts.intermediate_size, sum(experts.layers)) if experts else (0,) * 4),
        len(windows), min(windows, default=0),
    )  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A candidate that was run: the step's counts and contexts, its plan and the seconds it took."""

    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    plan: StepPlan
    seconds: float


@dataclass(frozen=True)
class TunedTable:
    """Measured costs, and the candidates that were run to check what the simulator makes of them."""

    key: TuneKey
    costs: MeasuredCosts
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ratios", _ratios(self.costs, self.checks))

    def corrections(self, tokens: int) -> dict[str, float]:
        """Measured over simulated time by mode, interpolated between the sizes that were run: at those sizes the
        choice is by measurement, between them there is no jump. A mode that never ran is corrected as the others are
        on the mean: what the simulator misses in one it mostly misses in all.
        """
        ratios: Mapping[str, Mapping[int, float]] = self._ratios  # type: ignore[attr-defined]
        found = {mode: float(np.interp(tokens, list(r), list(r.values()))) for mode, r in ratios.items()}
        mean = sum(found.values()) / len(found) if found else 1.0
        return dict.fromkeys(MODES, mean) | found

    def save(self, directory: Path) -> Path:
        """Write the table whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / self.key.filename()
        handle, partial = tempfile.mkstemp(dir=directory, suffix=".partial")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        return path

    def to_json(self) -> dict[str, Any]:
        costs = self.costs
        return {
            "format": FORMAT,
            "key": dataclasses.asdict(self.key),
            "costs": {
                "layers": costs.layers,
                "stages": {stage: _points(curve) for stage, curve in costs.stages.items()},
                "norm": _points(costs.norm_curve),
                "all_reduce": _points(costs.all_reduce_curve),
                "reordered": _points(costs.reordered_curve),
                "fused": [[budget, _points(curve)] for budget, curve in costs.fused_curves.items()],
                "head": _points(costs.head_curve) if costs.head_curve else None,
                "pair_seconds": costs.pair_seconds,
                "key_seconds": costs.key_seconds,
                "contention": costs.contention,
                "grain": costs.grain,
            },
            "checks": [[list(c.counts), list(c.contexts), dataclasses.asdict(c.plan), c.seconds] for c in self.checks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TunedTable":
        """Raises ValueError if the data is not a table of this format."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"a tuned table of format {data['format']}; this version reads {FORMAT}")
            key, costs = data["key"], data["costs"]
            return cls(
                TuneKey(**key | {"model": tuple(key["model"])}),
                MeasuredCosts(
                    layers=costs["layers"],
                    stages={stage: Curve.of(dict(points)) for stage, points in costs["stages"].items()},
                    norm_curve=Curve.of(dict(costs["norm"])),
                    all_reduce_curve=Curve.of(dict(costs["all_reduce"])),
                    reordered_curve=Curve.of(dict(costs["reordered"])),
                    fused_curves={budget: Curve.of(dict(points)) for budget, points in costs["fused"]},
                    head_curve=Curve.of(dict(costs["head"])) if costs["head"] else None,
                    pair_seconds=costs["pair_seconds"],
                    key_seconds=costs["key_seconds"],
                    contention=costs["contention"],
                    grain=costs["grain"],
                ),
                tuple(Check(tuple(a), tuple(b), StepPlan(**plan), s) for a, b, plan, s in data["checks"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tuned table: {type(error).__name__}: {error}") from None


def check_writable(directory: Path) -> None:
    """Raise ValueError if no table can be kept there: before measuring, not after it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"tuned tables are kept in {directory}, which cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to another place"
        ) from None


def cache_directory() -> Path:
    """Where tuned tables live: the user's cache."""
    return cache_root() / "plans"


def find(key: TuneKey, directory: Path) -> tuple[TunedTable | None, str]:
    """The table that holds for `key`, and one line that says which, or why there is none. Never raises."""
    path = directory / key.filename()
    try:
        table = TunedTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, "not tuned here yet"
    except (OSError, ValueError) as error:
        return None, f"{path} is not usable: {error}"
    difference = key.mismatch(table.key)
    return (None, f"tuned elsewhere: {difference}") if difference else (table, f"tuned: {path}")


def _points(curve: Curve) -> list[list[float]]:
    return [[size, seconds] for size, seconds in zip(curve.sizes, curve.seconds, strict=True)]


def _ratios(costs: MeasuredCosts, checks: Sequence[Check]) -> dict[str, dict[int, float]]:
    """{mode: {tokens: measured / simulated}}, sizes rising. Of each mode and size the check counts that is simulated to
    be fastest: it is the one that would be chosen, and the fastest measured of several may just have been lucky."""
    simulated: dict[tuple[str, int], tuple[float, float]] = {}  # (simulated, measured)
    for check in checks:
        where = (check.plan.mode, sum(check.counts))
        seconds = simulate(costs, StepShape(check.counts, check.contexts), check.plan).seconds
        simulated[where] = min(simulated.get(where, (inf, inf)), (seconds, check.seconds))
    ratios: dict[str, dict[int, float]] = {}
    for (mode, tokens), (seconds, measured) in sorted(simulated.items()):
        ratios.setdefault(mode, {})[tokens] = measured / seconds
    return ratios
