"""Moved to the lab: says the new name."""

raise SystemExit("error: moved: ./launch.sh sweep and ./launch.sh slurm")
