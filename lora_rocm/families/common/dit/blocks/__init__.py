"""Fused blocks of diffusers' transformers: the same modules with less memory traffic, using ``lora_rocm.kernels``.

There is one module per architecture that families train. In unusual cases a fused block calls diffusers' own code.
"""
