"""Puts the tests' own helper modules on the path of the tests and of the ranks they start."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts what runs in the background with interrupts ignored, and children inherit that: those that are
# interrupted by a test would not notice.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
