"""HOW IT COMPARES: the same job by Partita and by others, timed in turn in one process."""
