"""`python -m partita`."""

from partita.cli import app

app()
