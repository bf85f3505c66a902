"""CUDA C++ to machine code by NVRTC, which needs no GPU."""

from dataclasses import dataclass
from importlib import resources
from typing import Any

from tokenweave.comm.control import MAX_RANKS

SHARED_BYTES = 227 << 10  # what a block may have, on sm_90 and sm_100
BULK_FILES = ("rows.cuh", "meet.cu", "bulk.cu")
MULTICAST_FILES = ("rows.cuh", "meet.cu", "multicast.cu")
MEETING_FILES = ("rows.cuh", "meet.cu")
_STAGES = 16  # more than this no longer shortens a row
_OUTS = 2  # rows of a group that wait to be written


@dataclass(frozen=True)
class Compiled:
    """log: what the assembler says of registers and spills."""

    cubin: bytes
    ptx: str
    log: str


@dataclass(frozen=True)
class Tiling:
    """How a block of the bulk kernel is divided for rows of one size. See bulk.cu."""

    warps: int
    groups: int
    stages: int
    row_bytes: int

    @staticmethod
    def of(row_bytes: int) -> "Tiling | None":
        """For rows of so many bytes; None if they cannot be moved by bulk copies."""
        if row_bytes % 16 != 0:
            return None
        # Four chunks of 16 bytes a thread. Groups that take turns on a processor hide each other's sums and norms.
        warps = max(1, min(16 if row_bytes <= 1 << 15 else 15, -(-row_bytes // (16 * 32 * 4))))
        groups = max(1, min(4, 16 // warps))
        room = SHARED_BYTES - 3072  # tables, barriers and sums
        stages = min(_STAGES, room // row_bytes // groups - _OUTS)
        return Tiling(warps, groups, stages, row_bytes) if stages >= 4 else None

    @property
    def threads(self) -> int:
        return self.groups * (self.warps + 1) * 32

    @property
    def shared_bytes(self) -> int:
        rows = self.groups * (self.stages + _OUTS) * self.row_bytes
        return rows + self.groups * (self.stages * 16 + self.warps * 8) + 2 * 8 * MAX_RANKS + 8

    @property
    def defines(self) -> dict[str, int]:
        return {"WARPS": self.warps, "GROUPS": self.groups, "STAGES": self.stages, "OUTS": _OUTS}


def multicast_warps(row_bytes: int) -> int:
    """Of a block of the multicast kernel: four chunks of 16 bytes a thread."""
    return max(1, min(16, -(-row_bytes // (16 * 32 * 4))))


def compile_cuda(files: tuple[str, ...], defines: dict[str, int], capability: tuple[int, int]) -> Compiled:
    """The files of this package, one after another. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    here = resources.files("tokenweave.comm.kernels")
    source = "".join(f'#line 1 "{name}"\n{here.joinpath(name).read_text(encoding="utf-8")}' for name in files)
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "--device-as-default-execution-space",
        "--ptxas-options=-v", *(f"-D{name}={value}" for name, value in defines.items()),
    ]  # fmt: skip
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), files[-1].encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC could not compile {files[-1]}: {log}")
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled(cubin, _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    text = b" " * _checked(size_of(program))
    _checked(read(program, text))
    return text


def _checked(answer: tuple[Any, ...]) -> Any:
    if answer[0].value != 0:
        raise RuntimeError(f"NVRTC: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None
