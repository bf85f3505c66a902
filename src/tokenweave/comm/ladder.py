"""Which collective a group uses: the highest rung that all its ranks can stand on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One collective. obstacle: why it cannot be used here, None if it can."""

    name: str
    obstacle: str | None


def ladder(device: str = "cpu", *, one_host: bool = True) -> list[Rung]:
    """The rungs from the highest down, for ranks on `device`; one_host: whether one caller on this host starts them all."""
    shared = None
    if device != "cpu":
        shared = f"its ranks are on the CPU, not on {device}"
    elif not one_host:
        shared = "its ranks must be started on one host by one caller, which hands the memory down to them"
    return [Rung("shared_memory", shared), Rung("distributed", None)]


def choose(collective: str = "auto", device: str = "cpu", *, one_host: bool = True) -> str:
    """The name of the rung that `collective` means here: itself, or the highest usable one for "auto".

    Raises ValueError for an unknown device or collective, or one that cannot be used here. Depends on its arguments
    only, so all ranks come to the same answer.
    """
    if device != "cpu":
        raise ValueError(f"device must be 'cpu', got {device!r}")
    rungs = {rung.name: rung for rung in ladder(device, one_host=one_host)}
    if collective == "auto":
        return next(rung.name for rung in rungs.values() if rung.obstacle is None)
    if collective not in rungs:
        raise ValueError(f"collective must be one of auto, {', '.join(rungs)}, got {collective!r}")
    if (obstacle := rungs[collective].obstacle) is not None:
        raise ValueError(f"collective {collective!r} cannot be used here: {obstacle}")
    return collective
