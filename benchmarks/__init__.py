"""Our engine and its peers on the same model, data and seed: time, bytes and memory of a step. `make bench` runs it."""
