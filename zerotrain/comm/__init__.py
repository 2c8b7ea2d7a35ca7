"""The only caller of torch.distributed's collectives, and the ledger of what they sent."""
