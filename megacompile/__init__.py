"""megacompile: train models far larger than device memory, at full precision, on one accelerator."""
