"""`python -m partita` is the `partita` command."""

from partita.cli import main

if __name__ == "__main__":
    main()
