"""What runs in vLLM's engine and worker processes."""
