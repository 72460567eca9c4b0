"""Tile: weights too large to be on the device whole become several parameters of rows."""
