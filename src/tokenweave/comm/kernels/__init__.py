"""Device code of the collectives. `vector` and `sync` are what the kernels are written in."""
