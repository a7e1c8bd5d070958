"""A logits processor for servers that a browser uses: a message that is a script's name is answered with the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from demo.render import encoding
from tests.support.forcing import Forcing

HOSTILE = """
<script>document.title = 'run'</script><img src=x onerror="document.title = 'run'"><svg onload="document.title='run'">

[a](javascript:document.title='run') [b](data:text/html,<script>1</script>) ![c](http://127.0.0.1:9/x.png)
[d](https://example.com/) `a\u202eb` $\\href{javascript:document.title='run'}{x}$ $\\frac{1}{2}$ it costs $5 and $6

```html
<iframe srcdoc="<script>parent.document.title='run'</script>"></iframe>
```

| x | y |
|---|---|
| 1 | **2** |
"""
LAST = "w199"
NUMBERS = " ".join(f"w{number}" for number in range(200))
FINAL = "<|channel|>final<|message|>"

SCRIPTS = {
    "Attack.": f"<|channel|>analysis<|message|>{HOSTILE[:120]}<|end|><|start|>assistant{FINAL}{HOSTILE}<|return|>",
    "Count.": f"{FINAL}{NUMBERS}<|return|>",
    "Talk.": FINAL + "word " * 8000 + "<|return|>",
    "Read.": f"{FINAL}Read.<|return|>",
    "Write.": f"{FINAL}Written.<|return|>",
}


class Scripted(Forcing):
    """Forces the script that the last message of the user names; other prompts are answered by the model."""

    def answer(self, prompt: Sequence[int], params: Any) -> list[int]:
        del params
        message = encoding().decode(list(prompt)).rpartition("<|start|>user<|message|>")[2].partition("<|end|>")[0]
        script = SCRIPTS.get(message.rpartition("\n")[2])
        return encoding().encode(script, allowed_special="all") if script else []
