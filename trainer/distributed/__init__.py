"""Ranks: what torchrun tells, the process group, joint decisions, simulated ranks."""
