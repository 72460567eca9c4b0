"""The planner: from plain numbers of blocks and a machine to the fastest plan that fits."""
