"""The prompt and its grammar. In: a `CreateRequest` and the items before it. Out: Harmony.

`history` reads items as messages, `open_tools` opens the request's tools into a `toolset`, `developer` writes the
developer message, `conversation` joins them and cuts them to the context window, `constraint` makes the grammar.
"""
