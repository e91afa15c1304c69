"""`python -m weightyard`: the command line, where its script is not on the PATH."""

from weightyard.cli import main

if __name__ == "__main__":
    main()
