"""``python -m f8fx``: the command line of :mod:`f8fx.cli`."""

import sys

from f8fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
