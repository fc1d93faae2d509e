"""What a terminal shows and what a command line says: flags, lines, progress, numbers and tables as text."""
