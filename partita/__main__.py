"""`python -m partita` is the `partita` command."""

import os


def main() -> None:
    """Run the command; Ctrl-C while its code is imported ends it as Ctrl-C does later."""
    try:
        from partita.cli import main as run

        run()
    except KeyboardInterrupt:
        os.write(2, b"partita: interrupted\n")
        os._exit(130)


if __name__ == "__main__":
    main()
