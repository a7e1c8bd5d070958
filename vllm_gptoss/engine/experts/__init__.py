"""MXFP4 experts, from vLLM's quantization interface down to the bytes that a kernel reads.

`config` selects the plugin for the checkpoint's experts. `method` implements vLLM's method class. `sm90` locates the
weights in vLLM's layout (`mxfp4` has the index maps). `engine/kernels/experts.py` launches the kernels. `dequantize`
converts the weights to a wider dtype instead, for CPUs.
"""
