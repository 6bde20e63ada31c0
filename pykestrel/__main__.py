"""`python -m pykestrel` is `kestrel`."""

from pykestrel.cli import main

if __name__ == "__main__":
    main()
