"""`python -m hiresvis`, the same as the installed `hiresvis`."""

from hiresvis.cli import main

if __name__ == "__main__":
    main()
