"""The groups of parameters, with their hyperparameters and their optimizers."""
