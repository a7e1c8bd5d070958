"""`vllm-gptoss bench numerics`, from a checkout: the same options."""

import typer

from vllm_gptoss.bench.numerics import main

if __name__ == "__main__":
    typer.run(main)
