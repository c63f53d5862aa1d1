"""DeepSeek-V4 on SGLang with every large matrix in native NVFP4."""

__version__ = "0.1.0"
