"""The two system calls that some builds of Python leave out of `os` (those made against old headers)."""

import ctypes
import fcntl
import os

_PIDFD_OPEN = 434  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def memfd(name: str, size: int) -> int:
    """A descriptor of `size` bytes of zeros without a name in any file system; memory is taken as it is touched.

    Not inherited by other processes unless handed down."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        fd = _checked(_libc.memfd_create(name.encode(), 1))  # MFD_CLOEXEC
    if fd <= 2:  # a standard stream is closed here, and would be put over it in the processes it is handed to
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    os.ftruncate(fd, size)
    return fd


def pidfd(pid: int) -> int:
    """A descriptor that polls readable once process `pid` has ended. ProcessLookupError if there is none."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
