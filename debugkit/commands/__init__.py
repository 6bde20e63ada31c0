"""One module per command of `debugkit`; `cli.py` imports the one that is asked for."""
