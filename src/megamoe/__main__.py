"""``python -m megamoe`` is the ``megamoe`` command."""

from megamoe.cli import main

if __name__ == "__main__":
    main()
