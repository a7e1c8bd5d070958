"""The host's side of each CUDA kernel: which sizes it takes, what it is compiled from, how it is launched.

In: tensors and sizes. Out: launches. `nvrtc` compiles the sources of `cuda/` and keeps the cubins; `layer` and `step`
hold the records that kernels share; a file named `…_plan` counts without torch.
"""
