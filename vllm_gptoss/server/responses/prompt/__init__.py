"""What the model is told, and held to. In: a `CreateRequest` and the items before it. Out: Harmony.

`toolset` opens the request's tools, `history` reads items as messages, `developer` writes the developer message,
`conversation` puts them together and cuts them to the context window, `constraint` makes the engine's grammar.
"""
