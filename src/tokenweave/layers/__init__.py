"""Tensor-parallel layers: each computes its rank's partial sum and never communicates."""
