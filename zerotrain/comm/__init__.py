"""The only layer that calls torch.distributed's collectives, and the ledger of what they sent."""
