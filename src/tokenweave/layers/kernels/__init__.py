"""CPU kernels: simd.py generates vector code; the other files are Numba functions built on it."""
