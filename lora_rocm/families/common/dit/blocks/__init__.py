"""Blocks of diffusers' transformers with less memory traffic: the same modules, computed by ``lora_rocm.kernels``.

A module for each library class that families train. Anything but the plain case falls back to diffusers' own code.
"""
