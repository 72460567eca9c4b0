"""Storage: checkpoints and exports."""
