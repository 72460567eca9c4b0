"""Step: the light step's operations, their proof, and their Python source."""
