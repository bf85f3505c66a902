"""How far a lane has come, written by the GPU where the host reads it: before and after each operation of a library's.

Launched with the operation, so that replays of a graph count too. The words are those of `vigil.Progress`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["code", "rows", "columns"])
def begin(count, progress, code, rows, columns):
    """count: of the operations begun, in GPU memory. progress: memory of the host that the GPU reaches, written through
    its cache: the next kernel of a graph may wait for ever."""
    begun = tl.load(count) + 1
    tl.store(count, begun)
    tl.store(progress + 1, code, cache_modifier=".wt")
    tl.store(progress + 2, rows, cache_modifier=".wt")
    tl.store(progress + 3, columns, cache_modifier=".wt")
    tl.store(progress, begun, cache_modifier=".wt")


@triton.jit
def finish(count, progress):
    tl.store(progress + 4, tl.load(count), cache_modifier=".wt")
