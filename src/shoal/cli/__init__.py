"""The command line: one thin file for each verb."""


def main() -> None:
    """Runs the program `shoal`, and ends the process with its exit code."""
    from shoal.cli.program import main as program

    program()
