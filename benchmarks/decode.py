"""`vllm-gptoss bench decode`, from a checkout: the same options, results beside this file."""

import typer

from vllm_gptoss.bench.decode import main

if __name__ == "__main__":
    typer.run(main)
