"""Fused Triton kernels, one operator per file, each with a plain torch reference."""
