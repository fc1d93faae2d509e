"""Many settings, one row each, also as a SLURM array."""
