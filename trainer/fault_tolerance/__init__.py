"""What may go wrong in a run, and with which exit code it ends: numbers, hangs, slow ranks, errors."""
