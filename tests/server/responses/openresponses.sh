#!/bin/sh
# Puts the Open Responses compliance suite where test_serve.py looks for it: `openresponses.sh [git repository]`.
# Needs git and npm, and once a repository that has the commit: the project's own by default, or any copy of it.
set -eu
commit=92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c
target=${GPTOSS_OPENRESPONSES:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-gptoss/openresponses}
mkdir -p "$target"
cd "$target"
[ -d .git ] || git init -q
git cat-file -e "$commit" 2>/dev/null || git fetch -q --depth 1 "${1:-https://github.com/openresponses/openresponses}" "$commit"
git checkout -q "$commit"
# Only what the runner imports, not the site's own dependencies.
mkdir -p run
(cd run && npm init -y >/dev/null && npm install --no-audit --no-fund zod@3.25.76 bun@1.4.5)
ln -sfn run/node_modules node_modules
