"""The command line: one thin file for each verb."""


def main() -> None:
    """The program `shoal`."""
    from shoal.cli.main import main as program

    program()
