"""Run: the operations that emitted steps call, on the CPU and on CUDA devices."""
