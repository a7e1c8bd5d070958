"""Recipes: what to type on which machine, for what, and what one gets. The data is the folder `recipes/`.

Read downwards: `schema` is one file of recipes, `load` reads it with the line of every error, `find` answers for a
machine, `deployment` tells `choose` what a recipe serves, `probe` asks a vLLM release's own parser, `check` holds a
recipe or a command against all of it, `plan` says what fits, `render` writes what a user runs, `launch` runs it, `cli`
is the command.
"""
