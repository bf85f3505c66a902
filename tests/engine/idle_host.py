"""Holds a network namespace: python -m engine.idle_host SETTINGS, until its standard input ends."""

import sys

print('"here"', flush=True)
sys.stdin.read()
