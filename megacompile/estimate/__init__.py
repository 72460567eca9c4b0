"""Estimate: will a model fit a machine, and how fast, from its shapes alone."""
