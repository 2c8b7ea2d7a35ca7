"""The memory and traffic of a run before it runs: a step of the real engine, rehearsed on tensors without memory."""
