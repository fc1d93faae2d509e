"""Will it fit, how fast, on how many GPUs? Formulas, without a GPU."""
