"""What is raised for checkpoints that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names what is missing or misshapen."""
