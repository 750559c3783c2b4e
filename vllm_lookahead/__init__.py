"""Lookahead Decoding for vLLM: several tokens per forward pass, the same tokens.

Importing this package must stay free of vLLM, torch and side effects: vLLM imports it through
the ``vllm.general_plugins`` entry point in every one of its processes, also when lookahead is
not asked for.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Entry point ``vllm.general_plugins``: teach vLLM the method ``lookahead``.

    Idempotent, and inert until a request for the method is made. On a vLLM outside of the
    supported range nothing is touched but the places where lookahead can be asked for,
    which then say so.
    """
    from vllm_lookahead.plugin import install

    install()
