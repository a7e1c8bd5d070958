"""Strings with a bounded length and no pattern, counted in blocks.

Counting is slow in xgrammar 0.2.8: `character{0,600}` costs the engine seconds for every token, and a rule for each
character takes seconds to compile. Here blocks of `BLOCK` characters follow each other, with the same few rules for
every bound. The engine compiles these rules once, in 1.5 s of CPU; the cost of a grammar does not include them.

xgrammar checks a token that crosses the end of a block every time, and most tokens could cross one. So there are two
chains of blocks. The blocks of one chain end in the middle of the other's blocks. A token of up to `BLOCK / 2`
characters that crosses an end in one chain is inside a block of the other. Measured: 0.5 ms a token, 4 at worst.
"""

from __future__ import annotations

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.rules import Rules, price
from vllm_gptoss.server.harmony.enforce.width import CHAINS, STATES

BLOCK = 32
"""Characters; must be even."""

MAX_LENGTH = 20_000

_RAW, _ESCAPED = r'[^"\\\x00-\x1f]', r'"\\" plainly'
_PLAINLY = (
    r'["\\/bfnrt] | "u" ( [0-9a-cA-CeEfF] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] | [dD] [0-7] [0-9a-fA-F] [0-9a-fA-F] )'
)
"""Escapes of one character each. Surrogates are excluded: a pair would count as two, but JSON Schema counts one."""
_COST = price([(0x20, 0x10FFFF)])


def bounded(rules: Rules, least: int, most: int | None) -> str | None:
    """The rule for a quoted string of `least` to `most` characters; `most` None for any number.

    The string may spell control tokens, because forbidding them takes four times the states: see `harmony/held.py`.

    Raises:
        NotEnforceableError: a bound is more than `MAX_LENGTH`.
    """
    for name, bound in (("minLength", least), ("maxLength", most or 0)):
        if bound > MAX_LENGTH:
            raise NotEnforceableError(name, f"is more than {MAX_LENGTH}")
    if most is not None and least > most:
        return None
    escape(rules)
    begin = [_chain(rules, least, most, end) for end in (BLOCK, BLOCK // 2)]
    rule = rules.add(f'"\\"" ( {" | ".join(dict.fromkeys(begin))} )')
    rules.widths.string(rule, CHAINS if most is None or most > BLOCK else STATES)
    return rule


def escape(rules: Rules) -> str:
    """The rule for one escaped character, whether or not the character needs an escape."""
    rules.add(_PLAINLY, "plainly")
    return _ESCAPED


def _chain(rules: Rules, least: int, most: int | None, last: int) -> str:
    """A chain of blocks that ends `last` characters before the longest string's end.

    Without `most` the chain ends `BLOCK - last` characters after `least`.
    """
    goal = least + BLOCK if most is None else most
    after = "s0" if most is None else _last(rules, max(0, least - max(0, goal - last)), min(goal, last))
    at = max(0, goal - last)
    while at > 0:
        size = min(BLOCK, at)
        at -= size
        ways = [f"{_block(rules, size)} {after}"]
        if least <= at:
            ways.append(_up_to(rules, size - 1))
        elif least < at + size:
            ways.append(f"{_block(rules, least - at)} {_up_to(rules, at + size - 1 - least)}")
        after = rules.add(" | ".join(ways))
    return after


def _block(rules: Rules, size: int) -> str:
    """Exactly `size` characters, at least one."""
    for count in range(1, size + 1):
        then = f" b{count - 1}" if count > 1 else ""
        rules.add(f"{_RAW}{then} | {_ESCAPED}{then}", f"b{count}")
    return f"b{size}"


def _up_to(rules: Rules, size: int) -> str:
    """At most `size` characters and the end of the string."""
    rules.add('"\\""', "e0")
    for count in range(1, size + 1):
        then = f"e{count - 1}"
        rules.add(f'"\\"" | {_RAW} {then} | {_ESCAPED} {then}', f"e{count}")
    return f"e{size}"


def _last(rules: Rules, least: int, most: int) -> str:
    """`least` to `most` characters and the end of the string."""
    name = _up_to(rules, most - least)
    for count in range(1, least + 1):
        then, name = name, f"e{most - least}n{count}"
        rules.add(f"{_RAW} {then} | {_ESCAPED} {then}", name, cost=_COST)
    return name
