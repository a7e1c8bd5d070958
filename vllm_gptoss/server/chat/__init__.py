"""Chat completions, completions and messages: our parser, prompt and constraints behind vLLM's routes."""
