"""What a local program will take: stored values, kernels, memory over time, a timeline."""
