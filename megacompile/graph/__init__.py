"""Rewrites of a captured graph: fusion, tiles, and what they share."""
