"""JSON schemas as grammars that hold the model to exactly what the schema allows.

In: a JSON schema. Out: an EBNF grammar for xgrammar's structural tags, or `NotEnforceableError` with the keyword that
has no grammar. xgrammar's own `json_schema` is not used: it anchors patterns, fixes the order of properties, refuses
properties that are not listed, lets a control token stand inside a string, and a hostile pattern ends its process.

`schema` multiplies combinations out → `json_grammar` and `containers` write rules, `strings` those of patterns (read by
`pattern`, an `automaton` each) and names, `lengths` those that only have a length, `numbers` those of bounds → `job`
does so in a confined worker → `compiling` keeps what was written.

What the engine pays has budgets, where their constants stand: bytes and milliseconds to compile one grammar (`rules`),
a token's milliseconds where alternatives begin alike (`width`), items (`containers`), characters (`lengths`), states
(`automaton`), values (`json_grammar`), and one request's sum (`compiling`). What is beyond is `NotEnforceableError`.
"""
