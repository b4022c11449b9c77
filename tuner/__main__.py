"""`python -m tuner` is `chunktune`."""

from tuner.cli import main

if __name__ == "__main__":
    main()
