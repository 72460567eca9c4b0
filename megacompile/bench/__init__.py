"""Bench: kernels against other providers, each checked before it is timed."""
