"""`python -m shoal` is the program `shoal`."""

from shoal.cli import main

main()
