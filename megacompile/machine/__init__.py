"""Machines: their rates, by name or measured, and the clock that times a step on them."""
