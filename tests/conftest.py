"""Puts the tests' own helper modules on the path of the tests and of the ranks they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
