"""The command line: one thin file for each verb."""


def main() -> None:
    """The program `shoal`."""
    from shoal.cli.program import main as program

    program()
