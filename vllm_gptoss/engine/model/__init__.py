"""gpt-oss's model class: vLLM's class with fused layers for decode steps.

`gpt_oss` is the class, and `fused_path` selects the kernels of a step: `one_token` launches one kernel for all layers,
`layer_upto16` six kernels a layer, and `many_tokens` the kernels of `layer_upto512`. `layer_binding` reads the tensors
of a layer from vLLM's objects.
"""
