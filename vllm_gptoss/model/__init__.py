"""gpt-oss's model class: upstream's, with our layers in front of it for steps of few tokens.

In: a step from vLLM's model runner. Out: hidden states, as upstream's. `gpt_oss` is the class; `few_tokens` runs the
six launches of `chain` a layer, `one_token` one launch for all; `place` finds what both need in vLLM's objects.
"""
