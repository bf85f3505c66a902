"""The kernels that count operations, under Triton's interpreter, for which Triton must be imported anew."""

import os
import subprocess
import sys
import textwrap

PROGRAM = """
    import torch
    from tokenweave.comm.kernels import progress
    from tokenweave.comm.vigil import PROGRESS_WORDS, Progress

    counts, told = (torch.zeros(2, PROGRESS_WORDS, dtype=torch.int64) for _ in range(2))
    for words in ((1, 5, 64), (0x10003, 8192, 3_000_000_000)):
        progress.begin[(1,)](counts[1], told[1], *words)
        print(*told[1].tolist())
        progress.finish[(1,)](counts[1], told[1])
        print(*told[1].tolist())
    print(int(told[0].abs().sum()), [int(word) for word in Progress])
"""


def test_begun_and_done_and_what() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 1 5 64 0 0 0 0",
        "1 1 5 64 1 0 0 0",
        "2 65539 8192 3000000000 1 0 0 0",
        "2 65539 8192 3000000000 2 0 0 0",
        "0 [0, 1, 2, 3, 4]",
    ]
