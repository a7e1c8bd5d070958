"""A small real gpt-oss: openai/gpt-oss-20b's on-disk format, a few conversations learned by heart. See README.md."""
