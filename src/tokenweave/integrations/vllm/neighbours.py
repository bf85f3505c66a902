"""Where a library that this project uses and vLLM do not get on."""

import sys


def let_vllm_look_at_llvmlite() -> None:
    """Before it makes a worker on a CPU vLLM asks every object in every loaded module for its `__dict__` (vLLM 0.32,
    triton_utils.dispatcher). llvmlite's library object takes that for the name of a C function and answers with one, on
    which vLLM fails: so would a second engine in one process. Have it answer with an empty dictionary.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}
