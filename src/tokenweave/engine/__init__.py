"""Requests, the paged cache, the scheduler, sampling, and the `LLM` that ties them to rank processes."""
