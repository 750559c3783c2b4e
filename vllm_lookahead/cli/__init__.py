"""The ``vllm-lookahead`` command: one module of this package per subcommand.

A subcommand's module has ``add_parser(subparsers)``, which sets the ``run`` default to a function
that takes the parsed arguments and returns the exit code. Nothing heavy is imported before ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_lookahead import __version__
from vllm_lookahead.cli import demo, demo_model, fix_vllm_cpu
from vllm_lookahead.cli.errors import CommandError

COMMANDS = (demo_model, demo, fix_vllm_cpu)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-lookahead", description="Lookahead Decoding for vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns its exit code; 2, as for wrong usage, when it could not do its work.
    """
    args = build_parser().parse_args(argv)
    try:
        exit_code: int = args.run(args)
    except CommandError as error:
        print(f"vllm-lookahead: {error}", file=sys.stderr)
        return 2
    return exit_code
