"""What is wrong with a command line."""


class UsageError(Exception):
    """The command line asks for something that cannot be: says what, why, and what to write instead."""
