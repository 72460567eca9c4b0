"""Hardware: machines and their rates, the simulated step, and a GPU's caching allocator."""
