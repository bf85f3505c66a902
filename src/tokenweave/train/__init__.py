"""Training over tensor-parallel ranks: the stage list with gradients, the optimizer, checkpoints, the loop."""
