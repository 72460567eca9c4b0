"""Schedule: a plan and its step as people look at it, printed, drawn, explained, compared."""
