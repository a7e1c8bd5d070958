"""Recipes: commands for a machine, a model and a goal, with what was measured. The data is the folder `recipes/`.

Read downwards: `schema` is one file of recipes, `load` reads it with the line of every error, `find` selects for a
machine, `deployment` describes a configuration for `choose`, `flags` reads a command, `probe` runs a vLLM release's
parser and engine checks, `verdicts` is a table of their refusals, `check` applies every rule to a recipe or a command,
`plan` calculates memory, `render` writes commands and files, `launch` runs one, `cli` is the command.
"""
