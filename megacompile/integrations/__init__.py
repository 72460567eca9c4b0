"""Trainers of other libraries over a megacompile program, each a subclass with the name that it has there."""
