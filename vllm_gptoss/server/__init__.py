"""The parts of the plugin that run in the API server's process."""
