"""Blocks: a model's graph in parts, their functions per checkpoint policy, and their weight groups."""
