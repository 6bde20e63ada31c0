"""`python -m debugkit` is the `debugkit` command."""

from debugkit.cli import main

if __name__ == "__main__":
    main()
