"""MXFP4 experts, from what vLLM asks for down to what a kernel reads.

`config` claims the checkpoint's experts, `method` serves them, `sm90` finds the weights in upstream's layout (`mxfp4`
has its index maps) and `engine/kernels/experts.py` launches. `dequantize` is the other way, for CPUs.
"""
