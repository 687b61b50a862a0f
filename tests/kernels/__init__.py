"""vLLM's attention kernels, with real torch and Triton and no GPU: what they compute and what they compile to."""
