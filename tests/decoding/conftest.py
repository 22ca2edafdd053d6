"""What the decoding tests share."""

import contextlib

import jax
import pytest


@pytest.fixture(scope="session")
def count_compilations():
    """A context that lists the functions compiled inside it, by name; `decode_loop` is 'jit(decode_loop)'."""

    @contextlib.contextmanager
    def counting():
        names = []

        def listen(event, duration, fun_name="", **_):
            if event == "/jax/core/compile/backend_compile_duration":
                names.append(fun_name)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield names
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting
