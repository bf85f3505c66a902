"""Rows of a vocabulary-parallel embedding table."""
# mypy: disallow-untyped-defs=False

from tokenweave.layers.kernels.jit import kernel
from tokenweave.layers.kernels.simd import rows_at


@kernel
def look_up_rows(ids, first, table, out):
    """out[t] = table[ids[t] - first], zeros for ids outside the table; out: address of contiguous rows."""
    rows = rows_at(table, out, ids.size, table.shape[1])
    for token in range(ids.size):
        local = ids[token] - first
        if 0 <= local < table.shape[0]:
            rows[token] = table[local]
        else:
            rows[token] = 0
