"""Differentiate: each template becomes forward, recompute and backward functions per checkpoint policy."""
