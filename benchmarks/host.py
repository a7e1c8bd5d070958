"""`vllm-gptoss bench host`, from a checkout: the same options, results beside this file."""

import typer

from vllm_gptoss.bench.host import main

if __name__ == "__main__":
    typer.run(main)
