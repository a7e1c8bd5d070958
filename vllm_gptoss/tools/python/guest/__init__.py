"""What runs inside the portable tier's WebAssembly, on its own CPython: shown there as a folder, not imported here."""
