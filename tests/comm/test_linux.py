"""Memory files where standard streams are closed."""

import os

from tokenweave.comm.linux import memfd


def test_a_memory_file_never_takes_the_place_of_a_standard_stream() -> None:
    kept = os.dup(0)
    try:
        os.close(0)
        fd = memfd("test", 4096)
        try:
            assert fd > 2 and os.fstat(fd).st_size == 4096 and not os.get_inheritable(fd)
        finally:
            os.close(fd)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
