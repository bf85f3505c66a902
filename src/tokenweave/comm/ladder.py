"""Which collective a group uses: the highest rung that all its ranks can stand on."""

from dataclasses import dataclass

_ELSEWHERE = {"cpu": ("symmetric", "emulated"), "cuda": ("shared_memory",)}  # of another device than the key


@dataclass(frozen=True)
class Rung:
    """One collective. obstacle: why it cannot be used here, None if it can."""

    name: str
    obstacle: str | None


def ladder(device: str = "cpu", *, one_caller: bool = True) -> list[Rung]:
    """The rungs from the highest down. one_caller: one process on this host starts all ranks, as `launch` does."""
    obstacle = None
    if not one_caller:
        obstacle = "its ranks must be started on one host by one process, which hands the memory down to them"
    return [Rung("symmetric" if device == "cuda" else "shared_memory", obstacle), Rung("distributed", None)]


def choose(collective: str = "auto", device: str = "cpu", *, one_caller: bool = True) -> str:
    """The name of the rung that `collective` means here: itself, or the highest usable one for "auto".

    "auto" stays what it is for GPUs, which the ranks that one caller starts see and the caller does not; see
    `devices.gpu_rung`. It depends on the arguments only, so that all ranks come to the same answer. Raises ValueError
    for an unknown device or collective, or one that cannot be used here.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if collective == "emulated" and device == "cuda" or collective == "auto" and device == "cuda" and one_caller:
        return collective
    rungs = {rung.name: rung for rung in ladder(device, one_caller=one_caller)}
    if collective == "auto":
        return next(rung.name for rung in rungs.values() if rung.obstacle is None)
    if collective in _ELSEWHERE[device]:
        here, there = ("CPUs", "GPUs") if device == "cpu" else ("GPUs", "CPUs")
        raise ValueError(
            f"collective {collective!r} is for ranks on {there}; on {here} it can be auto, {' or '.join(rungs)}"
        )
    if collective not in rungs:
        raise ValueError(f"collective must be one of auto, {', '.join(rungs)}, got {collective!r}")
    if (obstacle := rungs[collective].obstacle) is not None:
        raise ValueError(f"collective {collective!r} cannot be used here: {obstacle}")
    return collective
