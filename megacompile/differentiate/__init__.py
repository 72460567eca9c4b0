"""Differentiate: each template becomes options of forward, recompute and backward functions."""
