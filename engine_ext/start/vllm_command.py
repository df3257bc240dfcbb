# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` and `vllm bench`, as vLLM's command runs them.

The command itself fails in the CPU build: that is installed under another name, of which the command asks the version.
"""

from vllm.entrypoints.cli import serve
from vllm.entrypoints.cli.benchmark import main as bench

from engine_ext.wire.vllm_compat import FlexibleArgumentParser, cli_env_setup


def main() -> None:
    """Parses and runs the command line."""
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm", description=__doc__)
    subparsers = parser.add_subparsers(required=True)
    for command in (*serve.cmd_init(), *bench.cmd_init()):
        command.subparser_init(subparsers).set_defaults(command=command)
    args = parser.parse_args()
    args.command.validate(args)
    args.command.cmd(args)


if __name__ == "__main__":
    main()
