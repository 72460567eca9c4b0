"""Plan: the fastest plan that fits the budgets, scored by simulating the step it leads to."""
