"""`python -m stellwerk` is the installed command `stellwerk`, for places where scripts are not on PATH."""

from stellwerk.cli.main import main

if __name__ == "__main__":
    main()
