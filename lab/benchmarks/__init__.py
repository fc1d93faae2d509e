"""The trainer beside others: FSDP2, DDP, TRL, published runs."""
