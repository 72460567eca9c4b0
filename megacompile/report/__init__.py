"""A schedule as people look at it: printed, drawn, explained, compared."""
