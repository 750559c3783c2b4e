"""What a subcommand raises when it cannot do its work."""


class CommandError(Exception):
    """The message is for the user: it says what is wrong and what to do about it."""
