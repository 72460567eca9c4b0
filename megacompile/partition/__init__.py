"""Partition: the flat graph becomes a chain of blocks; equal blocks share one template."""
