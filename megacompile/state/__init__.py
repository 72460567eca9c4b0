"""The state on the host: masters and moments, their Adam, NVMe, checkpoints."""
