"""gpt-oss's model class: upstream's, with our layers in front of it for decode steps.

In: a step from vLLM's model runner. Out: hidden states, as upstream's. `gpt_oss` is the class; `few_tokens` runs the
six launches of `chain` a layer, `one_token` one launch for all, `many_tokens` those of `chain_many` around cuBLAS's
products; `place` finds what all need in vLLM's objects.
"""
