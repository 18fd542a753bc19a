"""What the command line can do, a file for each command.

Each file has ``add``, which describes the command to argparse, and the function that runs it. They import what they
need when they run, so that ``doctor`` works where something else is broken.
"""

from .usage import UsageError

__all__ = ["UsageError"]
