"""Only what pyproject.toml cannot say: the top folder `recipes` is a folder of the package in a wheel."""

from setuptools import find_namespace_packages, setup

DATA = "vllm_gptoss.cli.recipes.data"

setup(packages=[*find_namespace_packages(include=["vllm_gptoss*"]), DATA], package_dir={DATA: "recipes"})
