"""Moved to the lab: says the new name."""

raise SystemExit("error: moved: ./launch.sh fit")
