"""The python tool: options, provider. Needs jupyter_client and pyzmq; ipykernel runs in the cage."""

from .options import PythonOptions
from .provider import PythonProvider, PythonSession

__all__ = ["PythonOptions", "PythonProvider", "PythonSession"]
