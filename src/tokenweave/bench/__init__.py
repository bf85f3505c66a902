"""Benchmarks: commands that time competitors side by side in one run."""
