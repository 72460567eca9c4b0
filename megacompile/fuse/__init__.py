"""Fuse: subgraphs of the captured forward become single operators with kernels of their own."""
