"""`python -m weightyard`: the command line, for when its script is not on the PATH."""

from weightyard.cli import main

if __name__ == "__main__":
    main()
