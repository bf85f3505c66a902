"""Compiling ahead of the first step."""

import numpy as np
import torch

from tokenweave.layers.kernels.attention import WHOLE_CONTEXT, attend_rows, attention_rows
from tokenweave.layers.kernels.linear import project_rows
from tokenweave.layers.kernels.lookup import look_up_rows
from tokenweave.layers.kernels.mlp import gate_rows, mlp_rows
from tokenweave.layers.kernels.views import STORED


def warm_up(dtype: torch.dtype) -> None:
    """Have every kernel ready for `dtype`: compiled the first time on a machine, 4 s, later read from disk, 0.25 s."""
    vector, matrix = np.empty(0, STORED[dtype]), np.empty((2, 2), STORED[dtype])
    table, blocks = np.empty((1, 1), np.float32), np.empty((1, 1, 1, 2), STORED[dtype])
    wide, narrow = np.empty(0, np.int64), np.zeros(1, np.int32)
    rotation, cache = (table, table), (blocks, blocks)
    step = wide, narrow, narrow[:0], wide, narrow.reshape(1, 1)
    norms = vector, vector, 0.0
    attention_rows(0, 0, 0, (matrix, vector, matrix, vector, *norms), rotation, cache, step, WHOLE_CONTEXT)
    attend_rows(0, 0, 0, 1, norms, rotation, cache, step, WHOLE_CONTEXT)
    mlp_rows(0, 0, 0, (matrix, vector, matrix, vector))
    gate_rows(0, 0, 0, 1, matrix)
    project_rows(0, 0, 0, matrix, vector)
    look_up_rows(wide, 0, matrix, 0)
