"""JSON schemas as grammars that hold the model to exactly what the schema allows.

In: a JSON schema. Out: an EBNF grammar for xgrammar's structural tags, or `NotEnforceableError` with the keyword that
has no grammar. xgrammar's own `json_schema` is not used: it anchors patterns, fixes the order of properties, refuses
unlisted properties, allows control tokens inside strings, and a hostile pattern ends its process.

`schema` expands combinations → `json_grammar` and `containers` write rules, `strings` those of patterns (`pattern`,
`automaton`) and names, `lengths` those of bounded lengths, `numbers` those of bounds → `job` runs all of this in a
confined worker → `compiling` caches the grammars.

Limits of the engine's cost, each in the named module: bytes and milliseconds to compile one grammar (`rules`),
milliseconds per token for alternatives with a common beginning (`width`), items (`containers`), characters (`lengths`),
states (`automaton`), values (`json_grammar`), and the sum of one request (`compiling`). Beyond a limit they raise
`NotEnforceableError`.
"""
