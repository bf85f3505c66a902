"""What a rank's process runs: python -m tokenweave.comm.worker SETTINGS, started by `processes` only."""

import atexit
import faulthandler
import importlib
import io
import json
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from tokenweave.comm.control import Control
from tokenweave.comm.group import Group, Opener
from tokenweave.comm.links import Link, Links
from tokenweave.comm.shared_memory import SharedMemory
from tokenweave.comm.watch import watch


def main() -> None:
    settings = json.loads(sys.argv[1])
    fds = settings["fds"]
    faulthandler.enable()
    torch.set_num_threads(settings["threads"])
    control = Control(settings["arena"])
    with os.fdopen(fds["setup"], "rb") as pipe:
        setup = pickle.load(pipe)
        pids = dict(enumerate(setup["pids"]))
        del pids[settings["rank"]]
        watch(settings["parent"], pids, control.mark_dead)
        body = io.BytesIO(pipe.read())
    _restore_path(setup)
    links = Links(Link(*fds["link"]), {int(rank): Link(*pair) for rank, pair in fds["peers"].items()})
    report = Connection(fds["report"], readable=False)
    try:
        target, args, emulation = pickle.load(body)
        with _group(settings, control, emulation) as group:
            value = _resolve(target)(group, links, *args)
            message = ("returned", cloudpickle.dumps(value), "")
    except (Exception, KeyboardInterrupt) as error:
        control.mark_dead(settings["rank"])  # the peers need not wait for the process to end
        message = ("raised", _pickled(error), traceback.format_exc())
    report.send_bytes(pickle.dumps(message))
    _exit()


def _exit() -> None:
    """End without the interpreter's own tidying up, which takes half a second with torch loaded."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _group(settings: dict[str, Any], control: Control, emulation: Any) -> Group:
    rank, size, device, collective = (settings[name] for name in ("rank", "size", "device", "collective"))
    opener: Opener
    if emulation is not None:
        from tokenweave.comm.emulated import emulated_group

        return emulated_group(emulation, device, settings["timeout"])
    if device != "cpu":
        from tokenweave.comm.devices import claim, gpu_rung

        place = claim(rank, size, collective)
        device, collective = str(place), gpu_rung(collective, rank, size)
        opener = _on_gpu(collective, settings["store"], rank, size, control, place)
    elif collective == "shared_memory":
        opener = SharedMemory(control, rank, size)
    else:
        from tokenweave.comm.distributed import Distributed  # 0.2 s that the others need not spend
        from tokenweave.comm.world import World

        opener = Distributed(World.of_one_host(settings["store"], rank, size))
    return Group(rank, size, opener=opener, device=device, collective=collective, timeout=settings["timeout"])


def _on_gpu(collective: str, store: int, rank: int, size: int, control: Control, place: torch.device) -> Opener:
    from tokenweave.comm.world import World

    world = World.of_one_host(store, rank, size)
    if collective == "symmetric":
        from tokenweave.comm.symmetric import Symmetric

        return Symmetric(control, world, place)
    from tokenweave.comm.distributed_gpu import DistributedOnGpus

    return DistributedOnGpus(world, place)


def _restore_path(setup: dict[str, Any]) -> None:
    """Search where the caller searches; the processes that this one starts get the caller's own PYTHONPATH."""
    sys.path[:] = setup["sys_path"]
    if setup["python_path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = setup["python_path"]


def _resolve(target: Any) -> Any:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _pickled(error: BaseException) -> bytes:
    try:
        return cloudpickle.dumps(error)
    except Exception:
        return b""  # the caller makes do with the traceback


if __name__ == "__main__":
    main()
