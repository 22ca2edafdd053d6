"""An address for processes that work together."""

import socket


def free_address():
    """HOST:PORT of this machine, where nothing listens yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
