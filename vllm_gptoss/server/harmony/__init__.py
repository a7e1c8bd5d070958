"""OpenAI's Harmony format on both sides of the model.

In: messages and tools, or the model's tokens. Out: tokens of a prompt, or text, reasoning and calls, none lost.
`prompt` writes, `parser` reads, `enforce` and `grammar` hold calls to their schemas.
"""
