"""What a step costs: time, memory, FLOPs, traces."""
