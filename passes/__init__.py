"""Scheduling passes: each takes a step and returns the step with more of its schedule written down."""
